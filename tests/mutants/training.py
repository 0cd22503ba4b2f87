"""Breaks of what trains a selector with its head."""

from tests.mutants.mutation import Mutation

TRAINED = "src/peagle_tools/train/head.py"
SAVED = "src/peagle_tools/train/checkpoints.py"
SELECTOR = "src/peagle_tools/train/selector.py"
SELECTED = "tests/train/test_selector.py::test_a_step_in_parts_is_the_whole_formula[7-20-ratio4]"
SERVED = "tests/train/test_selector.py::test_a_checkpoint_is_served_with_its_selector"

TRAINING = (
    Mutation(
        "selector: its predecessors begin at random",
        SELECTOR,
        "torch.zeros(head.verifier_vocab_size, rank)",
        "torch.randn(head.verifier_vocab_size, rank)",
        "tests/train/test_selector.py::test_a_new_selector_has_its_own_rate_and_no_weight_decay[adamw]",
    ),
    Mutation(
        "selector: checkpoints are judged without it",
        "src/peagle_tools/train/replay.py",
        "return found[REPLAY]",
        "return found.get(UNSELECTED, found[REPLAY])",
        "tests/train/test_selector.py::test_a_checkpoint_is_judged_with_its_selector",
    ),
    Mutation(
        "selector: its gradients are dropped",
        TRAINED,
        "output += self.candidate_selector.parameters()",
        "pass",
        SELECTED,
    ),
    Mutation(
        "selector: taken before the last norm", TRAINED, "of_selector(hidden[0]", "of_selector(states[0]", SELECTED
    ),
    Mutation(
        "selector: the predecessor is one token off",
        SELECTOR,
        "tokens[rows.position], ids",
        "tokens[rows.position - 1], ids",
        SELECTED,
    ),
    Mutation(
        "selector: a right token that is no candidate is not put in",
        SELECTOR,
        "ids, place, found = selector_training_candidates(best, truth.clamp(min=0))",
        "(_, place, found), ids = selector_training_candidates(best, truth.clamp(min=0)), best",
        SELECTED,
    ),
    Mutation(
        "selector: its loss is a mean over all supervised rows",
        SELECTOR,
        "(following[rows.position] >= 0).sum()",
        "(loss_mask[0, rows.position] != 0).sum()",
        SELECTED,
    ),
    Mutation(
        "selector: the first token of a document follows the one before it",
        SELECTOR,
        "(documents.ids[1:] == documents.ids[:-1]) & ",
        "",
        SELECTED,
    ),
    Mutation(
        "selector: its tables decay",
        SELECTOR,
        '"weight_decay": 0.0',
        '"weight_decay": options.weight_decay',
        "tests/train/test_selector.py::test_a_new_selector_has_its_own_rate_and_no_weight_decay[adamw]",
    ),
    Mutation(
        "selector: replay keeps the head's own drafts",
        SELECTOR,
        "return out\n",
        "return out.where(out < 0, self.ids[..., 0])\n",
        "tests/train/test_replay.py::test_a_selectors_drafts_are_walked[all-tokens]",
    ),
    Mutation(
        "checkpoint: vLLM reads the selector among the head's weights",
        SAVED,
        '(begun / INDEX).write_text(json.dumps(index, indent=2) + "\\n")',
        "pass",
        SERVED,
    ),
)
