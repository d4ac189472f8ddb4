"""Small per-example Flax models, one file a model, with loaders for real pretrained weights.

Each model is written for one example at its exact size: no padding, no mask and no batch axis in it. Fork a
file by copying it; a model imports nothing from `jaxbatch`.
"""
