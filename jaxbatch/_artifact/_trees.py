"""Structures of arguments and results as JSON: dicts, lists, tuples and None, and nothing that needs code.

A leaf is `"*"`. Named tuples are kept as tuples, since their class belongs to the program that saved them.
"""

from typing import Any

import jax

_LEAF = "*"
_MAX_DEPTH = 64


def tree_to_json(tree: Any, what: str) -> Any:
    """Return a tree structure as JSON data.

    Raises:
      TypeError: a node is of a class of its own, whose code an artifact does not carry.
    """
    data = tree.node_data()
    if data is None:
        return _LEAF
    kind, keys = data
    children = [tree_to_json(child, what) for child in tree.children()]
    if kind is type(None):
        return None
    if kind is dict and all(type(key) in (str, int) for key in keys):
        return {"dict": [list(pair) for pair in zip(keys, children, strict=True)]}
    if kind is list:
        return {"list": children}
    if issubclass(kind, tuple) and (kind is tuple or hasattr(kind, "_fields")):
        return {"tuple": children}
    raise TypeError(
        f"{what} holds a {kind.__name__}, and an artifact keeps dicts (with keys that are text or integers), "
        f"lists, tuples and None only. Convert it inside the function."
    )


def tree_from_json(data: Any) -> Any:
    """Return the structure that `tree_to_json` wrote."""
    return jax.tree.structure(_rebuilt(data, 0))


def _rebuilt(data: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError("a structure is nested too deeply")
    if data is None or data == _LEAF:
        return None if data is None else 0
    ((kind, children),) = data.items()
    match kind:
        case "dict":
            keys = [key for key, _ in children]
            if len(set(keys)) < len(keys) or any(type(key) not in (str, int) for key in keys):
                raise ValueError("a dict has keys that are none, or has one twice")
            return {key: _rebuilt(child, depth + 1) for key, child in children}
        case "list":
            return [_rebuilt(child, depth + 1) for child in children]
        case "tuple":
            return tuple(_rebuilt(child, depth + 1) for child in children)
    raise ValueError(f"there is no structure {kind!r}")
