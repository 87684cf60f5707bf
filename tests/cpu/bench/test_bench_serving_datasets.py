"""Prompts: lengths within their bounds, the same for the same seed, shared where they are meant to be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench_serving.arguments import DATASETS, FILE_DATASETS, parse_args
from bench_serving.datasets.base import (
    LoadConversation,
    PromptSource,
    TokenizerSource,
    WordSource,
    random_lengths,
)
from bench_serving.datasets.random_prompts import warm_up_like
from bench_serving.datasets.shared_prefix import SEPARATOR
from bench_serving.datasets.table import make_conversations
from runtime.base.errors import ConfigError
from runtime.settings.config import DEMO_MODEL
from runtime.text.tokenizer import load

TURN = {"from": "human", "value": "one two three"}
ANSWER = {"from": "gpt", "value": "four five"}


@pytest.fixture(scope="module")
def demo() -> TokenizerSource:
    return TokenizerSource(load(DEMO_MODEL))


def make(*flags: str, source: PromptSource | None = None, seed: int = 1) -> list[LoadConversation]:
    return make_conversations(parse_args(list(flags)), source or WordSource(), seed)


@pytest.mark.parametrize(("ratio", "shortest"), [(0.0, 1), (0.5, 5), (1.0, 10)])
def test_lengths_reach_both_bounds_and_none_is_beyond(ratio: float, shortest: int) -> None:
    lengths = random_lengths(np.random.default_rng(1), 10, ratio, 2000)
    # Each of at most 10 values is missed by 2,000 draws with probability 1e-91.
    assert set(lengths) == set(range(shortest, 11))


@pytest.mark.parametrize("dataset", sorted(set(DATASETS) - set(FILE_DATASETS)))
def test_the_seed_decides_every_prompt(dataset: str, demo: TokenizerSource) -> None:
    flags: tuple[str, ...] = ("--dataset-name", dataset, "--num-prompts", "4")
    if dataset == "generated-shared-prefix":
        flags += ("--gsp-num-groups", "2", "--gsp-prompts-per-group", "2", "--gsp-system-prompt-len", "16")
    assert make(*flags, source=demo) == make(*flags, source=demo)
    assert make(*flags, source=demo) != make(*flags, source=demo, seed=2)


def test_text_has_as_many_tokens_as_were_asked_for(demo: TokenizerSource) -> None:
    rng = np.random.default_rng(1)
    for length in (1, 2, 17, 300):
        assert demo.count(demo.text(rng, length)) == length
        assert WordSource().count(WordSource().text(rng, length)) == length


def test_random_ids_are_in_the_vocabulary_and_never_special(demo: TokenizerSource) -> None:
    tokenizer = load(DEMO_MODEL)
    ids = demo.ids(np.random.default_rng(1), 50_000)
    assert set(ids) <= set(tokenizer.vocabulary) - tokenizer.special_ids


def test_token_ids_without_a_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        make("--dataset-name", "random-ids")


def test_random_prompts_share_no_beginning(demo: TokenizerSource) -> None:
    flags = ("--num-prompts", "50", "--random-input-len", "40", "--random-range-ratio", "1")
    texts = [str(each.turns[0].prompt) for each in make(*flags, source=demo)]
    # Eight words of over a thousand: two of fifty prompts agree with probability 1e-21.
    assert len({" ".join(text.split()[:8]) for text in texts}) == 50


GSP = (
    *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3", "--gsp-prompts-per-group", "4"),
    *("--gsp-system-prompt-len", "20", "--gsp-question-len", "6", "--gsp-output-len", "5"),
    *("--gsp-num-turns", "2"),
)


def system_prompts(conversations: list[LoadConversation]) -> list[str]:
    return [str(each.turns[0].prompt).split(SEPARATOR)[0] for each in conversations]


def test_a_group_shares_its_system_prompt_and_nothing_else() -> None:
    made = make(*GSP, "--gsp-ordered")
    systems = system_prompts(made)
    assert systems == [system for system in dict.fromkeys(systems) for _ in range(4)]
    assert len(set(systems)) == 3
    assert {len(system.split()) for system in systems} == {20}
    assert {[turn.input_len for turn in each.turns] == [26, 6] for each in made} == {True}
    assert {turn.output_len for each in made for turn in each.turns} == {5}
    assert len({str(each.turns[0].prompt) for each in made}) == 12


def test_groups_are_mixed_unless_ordered_and_can_be_cut() -> None:
    ordered = system_prompts(make(*GSP, "--gsp-ordered"))
    mixed = system_prompts(make(*GSP))
    assert sorted(mixed) == sorted(ordered)
    assert mixed != ordered
    assert len(make(*GSP, "--num-prompts", "5")) == 5


def test_a_conversation_has_the_asked_number_of_turns() -> None:
    made = make("--dataset-name", "multi-turn", "--num-turns", "4", "--num-prompts", "3")
    assert [len(each.turns) for each in made] == [4, 4, 4]


def test_the_warm_up_is_as_long_and_shares_nothing_with_the_run(demo: TokenizerSource) -> None:
    made = make("--num-prompts", "2", "--random-range-ratio", "1", "--random-input-len", "30", source=demo)
    warm_up = warm_up_like(made, demo, np.random.default_rng(9), 3)
    assert [each.turns[0].input_len for each in warm_up] == [30, 30, 30]
    assert {each.turns[0].output_len for each in warm_up} == {32}
    assert not {each.turns[0].prompt for each in warm_up} & {each.turns[0].prompt for each in made}


def file_flags(path: Path, *more: str) -> list[str]:
    return ["--dataset-name", "custom", "--dataset-path", str(path), *more]


@pytest.mark.parametrize("as_lines", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        {"id": "x", "conversations": [TURN, ANSWER, TURN]},
        {"messages": [{"role": "user", "content": TURN["value"]}, {"content": ANSWER["value"]}]},
        {"prompt": TURN["value"], "output_len": 2},
    ],
)
def test_a_file_gives_the_first_turn_and_the_length_of_its_answer(
    tmp_path: Path, record: dict[str, object], as_lines: bool
) -> None:
    path = tmp_path / "data"
    data = [record, {"conversations": []}, {"conversations": [TURN]}]
    path.write_text("\n".join(map(json.dumps, data)) if as_lines else json.dumps(data))
    ((turn,),) = (each.turns for each in make(*file_flags(path, "--num-prompts", "1")))
    assert (turn.prompt, turn.input_len, turn.output_len) == (TURN["value"], 3, 2)
    ((turn,),) = (
        each.turns for each in make(*file_flags(path, "--num-prompts", "1", "--sharegpt-output-len", "9"))
    )
    assert turn.output_len == 9


def test_a_file_is_used_whole_unless_a_number_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data"
    unusable = [{"conversations": []}, {"conversations": [TURN]}, {"messages": []}]
    path.write_text(json.dumps([*unusable, *[{"conversations": [TURN, ANSWER]}] * 3]))
    assert len(make(*file_flags(path))) == 3
    assert len(make(*file_flags(path, "--num-prompts", "2"))) == 2


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        (
            json.dumps([{"conversations": [TURN, ANSWER]}]),
            ("--num-prompts", "2"),
            "has 1 usable records of 1, 2 were asked for",
        ),
        (
            json.dumps([{"conversations": [TURN, ANSWER]}]),
            ("--num-prompts", "1", "--sharegpt-context-len", "4"),
            "has 0 usable records",
        ),
        (json.dumps([{"conversations": [TURN]}]), (), "has 0 usable records of 1; one has .* output_len"),
        ('{"x": 1}', (), "record 1 has no conversations"),
        ('{"conversations": [{"from": "human"}]}', (), "a turn without a text"),
        ("[{", (), "neither JSON nor JSONL"),
    ],
)
def test_a_file_that_does_not_do_is_refused(
    tmp_path: Path, content: str, flags: tuple[str, ...], says: str
) -> None:
    path = tmp_path / "data"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        make(*file_flags(path, *flags))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dataset-path.*absent"):
        make(*file_flags(tmp_path / "absent"))
