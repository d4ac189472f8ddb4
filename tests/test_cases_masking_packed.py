"""The functions of `test_cases_masking` once more, with examples that share rows.

All of them take minutes; a few are in the default run, and JAXBATCH_ALL_CASES=1 asks for the rest.
"""

import os

import pytest
import ragged
import test_cases_masking as cases

FEW = (
    "test_a_softmax_weighted_sum_gives_padding_no_weight",
    "test_a_size_as_a_value_is_the_true_length",
    "test_a_loop_on_data_ends_for_each_example_on_its_own",
)
NEVER = {  # what no row can hold, and the part of the note that says so
    "test_same_convolutions_of_images_with_two_ragged_dims": "one ragged dim",
    "test_every_output_is_cut_to_its_own_formula_of_two_independent_lengths": "one ragged dim",
    "test_cross_attention_masks_queries_and_keys_by_their_own_lengths": "one ragged dim",
    "test_segment_sums_with_separate_buckets_for_nodes_and_edges": "one ragged dim",
    "test_an_example_without_keys_attends_to_nothing_and_stays_finite": "one ragged dim",
    "test_the_top_five_of_real_infinities_and_nan_and_an_error_for_fewer_examples": "raises at some lengths",
    "test_an_error_of_the_functions_own_for_short_examples_is_theirs_alone": "raises at some lengths",
}


@pytest.fixture(autouse=True)
def packed(monkeypatch, request):
    """Let the cases batch in packed rows, and check that they did."""
    runs = []

    def exact(*args, **options):
        runs.append(ragged.assert_exact(*args, layout="packed", **options))
        return runs[-1]

    monkeypatch.setattr(cases, "assert_exact", exact)
    yield
    reason = NEVER.get(request.function.__name__)
    for run in runs:
        assert (
            any(reason in note for note in run.statistics().notes) if reason else not run.statistics().notes
        )


def _wanted(name, test):
    chosen = name.startswith("test_") if os.environ.get("JAXBATCH_ALL_CASES") else name in FEW
    return chosen and "assert_exact" in test.__code__.co_names


globals().update({name: test for name, test in vars(cases).items() if _wanted(name, test)})
