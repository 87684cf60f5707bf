"""Logits processors of a launch: what they are given, what they change, and what fails with them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from carousel import Client, GenerationExecutor, InvalidRequest, RequestError, SamplingParams
from carousel import StructuredOutputsParams as Guide
from tests.harness.ring.launched import Launched, launched

OURS = "tests.harness.processors"
NAMES = {"ban": "BanRepeats", "force": "Force", "fail": "FailAt", "record": "Record"}
PROCESSORS = (
    "--logits-processor",
    *(f"{name}={OURS}:{kind}" for name, kind in NAMES.items()),
    "--logits-processor",
    f"batched={OURS}:BanRepeatsTogether",
)
SMALL = ("--dtype", "float32", "--cpu-threads", "1", "--max-running-requests", "8")
GREEDY: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
PROMPTS = ["def f(x):\n", "import os\n", "class A:\n    def", "for i in range("]
SEARCH = SamplingParams(max_tokens=20, n=2, use_beam_search=True, beam_width=4, ignore_eos=True)
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    with launched(*SMALL, "--max-beam-width", "4", "--gather-generation-logits", *PROCESSORS) as launch:
        yield launch


@pytest.fixture(scope="module")
def client(launch: Launched) -> Iterator[Client]:
    with Client(launch.run_dir) as client:
        yield client


def prompt_ids(launch: Launched, prompt: str) -> list[int]:
    answer = httpx.post(launch.url + "/tokenize", json={"prompt": prompt}, timeout=TIMEOUT_S)
    ids: list[int] = answer.json()["tokens"]
    return ids


def without_repeats(prompt: Sequence[int], logits: np.ndarray[Any, Any]) -> list[int]:
    """The reference: the likeliest id of each row of raw logits that has not come before."""
    seen = list(prompt)
    for row in torch.from_numpy(np.array(logits)):
        row[seen] = float("-inf")
        seen.append(int(row.argmax()))
    return seen[len(prompt) :]


def test_an_executor_names_one_in_tensorrt_llms_words(launch: Launched, client: Client) -> None:
    ids, params = prompt_ids(launch, PROMPTS[0]), SamplingParams(**GREEDY)
    with GenerationExecutor.create(run_dir=launch.run_dir) as executor:
        for name in ("ban", "batched"):
            result = executor.generate_async(ids, params, logits_post_processor_name=name)
            wanted = client.generate(ids, params, logits_processors=[{"name": name}], timeout=TIMEOUT_S)
            assert result.result(TIMEOUT_S).token_ids == wanted.token_ids
        for wrong in ("nobody", "x" * 300):
            with pytest.raises(InvalidRequest, match=r"^logits_post_processor_name") as caught:
                executor.generate_async(ids, params, logits_post_processor_name=wrong).result(TIMEOUT_S)
            assert caught.value.param == "logits_post_processor_name"


@pytest.mark.parametrize("name", ["ban", "batched"])
def test_each_token_is_drawn_with_all_before_it_known(launch: Launched, client: Client, name: str) -> None:
    """All at once, under overlap, beside rows without a processor, whose tokens are as ever."""
    params = SamplingParams(**GREEDY, return_generation_logits=True)
    plain = [client.generate(prompt, params, timeout=TIMEOUT_S).token_ids for prompt in PROMPTS]

    def generate(job: tuple[str, bool]) -> tuple[list[int], Any]:
        processors = [{"name": name}] if job[1] else None
        done = client.generate(job[0], params, logits_processors=processors, timeout=TIMEOUT_S).outputs[0]
        return list(done.token_ids), done.generation_logits

    jobs = [(prompt, is_processed) for prompt in PROMPTS for is_processed in (True, False)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(generate, jobs))
    for (prompt, is_processed), (ids, logits) in zip(jobs, results, strict=True):
        if is_processed:
            assert len(set(ids)) == 60
            assert ids == without_repeats(prompt_ids(launch, prompt), logits)
        else:
            assert ids == list(plain[PROMPTS.index(prompt)])
    assert all(len(set(ids)) < 60 for ids in plain), "otherwise nothing was banned"


def test_a_processor_is_called_once_for_each_token_with_what_the_executor_gives(
    launch: Launched, client: Client, tmp_path: Path
) -> None:
    processors = [{"name": "record", "args": {"folder": str(tmp_path)}}]
    params = SamplingParams(**{**GREEDY, "max_tokens": 9, "n": 2, "temperature": 1.0, "seed": 3})
    done = client.generate(PROMPTS[0], params, logits_processors=processors, label="mine", timeout=TIMEOUT_S)
    (file,) = tmp_path.iterdir()
    assert file.name == str(launch.pid_of("worker"))
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    prompt = prompt_ids(launch, PROMPTS[0])
    got = []
    for number in sorted({call[0] for call in calls}):
        own = [call for call in calls if call[0] == number]
        assert [len(call[2]) for call in own] == [len(prompt) + n for n in range(9)]
        assert all(call[1][:2] == [1, 1] and call[3] is None and call[4] == "mine" for call in own)
        got.append(own[-1][2])
    assert sorted(got) == sorted(prompt + list(each.token_ids[:-1]) for each in done.outputs)


def check_search(launch: Launched, client: Client, processors: Any) -> None:
    """No hypothesis has a token twice, or one of the prompt."""
    prompt = prompt_ids(launch, PROMPTS[0])
    done = client.generate(PROMPTS[0], SEARCH, logits_processors=processors, timeout=TIMEOUT_S)
    assert len({tuple(each.token_ids) for each in done.outputs}) == 2
    for each in done.outputs:
        assert len({*each.token_ids, *prompt}) == 20 + len(set(prompt))
    free = client.generate(PROMPTS[0], SEARCH, timeout=TIMEOUT_S).outputs[0]
    assert len({*free.token_ids, *prompt}) < 20 + len(set(prompt)), "otherwise nothing was banned"


@pytest.mark.parametrize("name", ["ban", "batched"])
def test_a_search_has_a_call_for_all_its_beams(
    launch: Launched, client: Client, name: str, tmp_path: Path
) -> None:
    record = {"name": "record", "args": {"folder": str(tmp_path)}}
    check_search(launch, client, [{"name": name}, record] if name == "ban" else [record, {"name": name}])
    calls = [json.loads(line) for (file,) in [tmp_path.iterdir()] for line in file.read_text().splitlines()]
    assert [call[1][1] for call in calls] == [1] + [4] * 19
    assert len({call[0] for call in calls}) == 1
    body = {"prompt": PROMPTS[0], "max_tokens": 5, "use_beam_search": True, "best_of": 4, "temperature": 0}
    both = [
        httpx.post(launch.url + "/v1/completions", json=body | more, timeout=TIMEOUT_S).json()["choices"]
        for more in ({"logits_processors": [{"name": "force", "args": {"token": 42}}]}, {})
    ]
    assert both[0][0]["text"] != both[1][0]["text"]
    assert both[0][0]["score"] == 0.0


def test_no_call_comes_behind_the_end(client: Client, tmp_path: Path) -> None:
    """The step that overlaps the last one is no call: the sequence has ended by a stop id."""
    plain = client.generate(PROMPTS[0], SamplingParams(**GREEDY), timeout=TIMEOUT_S).token_ids
    stop = next(id for id in plain if plain.index(id) > 3)
    done = client.generate(
        PROMPTS[0],
        SamplingParams(**{**GREEDY, "stop_token_ids": (stop,)}),
        logits_processors=[{"name": "record", "args": {"folder": str(tmp_path)}}],
        timeout=TIMEOUT_S,
    )
    assert done.outputs[0].finish_reason == "stop"
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == plain.index(stop) + 1


def test_several_are_called_in_their_order_and_a_guide_is_kept_behind_them(client: Client) -> None:
    both: Any = [{"name": "ban"}, {"name": "force", "args": {"token": 42}}]
    done = client.generate(PROMPTS[0], SamplingParams(**GREEDY), logits_processors=both, timeout=TIMEOUT_S)
    assert list(done.token_ids) == [42] * 60
    done = client.generate(
        PROMPTS[0],
        SamplingParams(max_tokens=60, seed=1),
        logits_processors=[{"name": "ban"}],
        structured_outputs=Guide(regex="[a-z]{5}"),
        timeout=TIMEOUT_S,
    )
    assert len(done.text) == 5
    assert done.text.isalpha()
    assert len(set(done.token_ids)) == len(done.token_ids)


def test_one_that_raises_ends_its_request_alone(launch: Launched, client: Client) -> None:
    plain = client.generate(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S).token_ids
    length = len(prompt_ids(launch, PROMPTS[0])) + 5
    other = client.stream(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S)
    failing = [{"name": "fail", "args": {"length": length}}]
    stream = client.stream(PROMPTS[0], SamplingParams(**GREEDY), logits_processors=failing, timeout=TIMEOUT_S)
    ids: list[int] = []
    with pytest.raises(RequestError, match=f"fail failed: ValueError: too long: {length}") as caught:
        ids.extend(id for delta in stream for id in delta.token_ids)
    error = caught.value
    assert (error.code, error.param, len(ids)) == ("logits_processor_failed", "logits_processors", 5)
    assert [id for delta in other for id in delta.token_ids] == list(plain)
    with pytest.raises(RequestError, match="got an unexpected keyword argument 'odd'"):
        client.generate("x", logits_processors=[{"name": "ban", "args": {"odd": 1}}], timeout=TIMEOUT_S)


def test_the_batched_one_ends_the_requests_that_named_it(client: Client) -> None:
    plain = client.generate(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S).token_ids
    params = SamplingParams(**{**GREEDY, "max_tokens": 400})
    batched = [{"name": "batched"}]
    first = client.stream(PROMPTS[0], params, logits_processors=batched, timeout=TIMEOUT_S)
    other = client.stream(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S)
    next(first)
    bad = client.stream(PROMPTS[2], params, logits_processors=batched, label="bad", timeout=TIMEOUT_S)
    for stream in (first, bad):
        with pytest.raises(RequestError, match="logits processor batched failed: ValueError: a bad client"):
            list(stream)
    assert [id for delta in other for id in delta.token_ids] == list(plain)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 3}}),
]
NESTED = '{"name": "ban", "args": {"x": ' + "[" * 1500 + "]" * 1500 + "}}"


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_over_http(launch: Launched, path: str, body: dict[str, Any]) -> None:
    def post(**fields: Any) -> httpx.Response:
        return httpx.post(launch.url + path, json=body | fields, timeout=TIMEOUT_S)

    answer = post(logits_processors=[{"name": "force", "args": {"token": 66}}])
    assert answer.status_code == 200, answer.text
    unforced = post(logits_processors=[])
    text, plain = (
        json.dumps(each.json().get("choices", each.json().get("text"))) for each in (answer, unforced)
    )
    assert text != plain
    for processors, param, words in (
        ([{"name": "other"}], "logits_processors[0].name", "there are ban, batched, fail, force, record"),
        ([{"name": "ban"}] * 9, "logits_processors", ""),
        ([{"name": "ban", "args": {"x": "y" * 4096}}], "logits_processors", "4096"),
        ([{"name": "batched", "args": {"x": 1}}], "logits_processors[0].args", "takes none"),
        ([{"name": "ban", "args": [1]}], "logits_processors[0].args", ""),
        (["os:system"], "logits_processors[0]", ""),
        ([{"qualname": "os.system", "name": "ban"}], "logits_processors[0].qualname", "code never comes"),
        ([{"args": {}}], "logits_processors[0]", "name"),
        ("ban", "logits_processors", ""),
    ):
        refused = post(logits_processors=processors)
        error = refused.json()["error"]
        assert refused.status_code == 400, refused.text
        assert error["param"] is None or error["param"].startswith(param), error
        assert param in error["message"], error
        assert words in error["message"], error
    nested = httpx.post(
        launch.url + path,
        content=f'{json.dumps(body)[:-1]}, "logits_processors": [{NESTED}]}}',
        headers={"Content-Type": "application/json"},
    )
    assert nested.status_code == 400, nested.text
    code = post(custom_logit_processor="gASV").json()["error"]
    assert (code["param"], code["code"]) == ("custom_logit_processor", "unsupported_parameter")
    assert "code never comes in a request" in code["message"]
    failed = post(logits_processors=[{"name": "fail"}])
    assert failed.status_code == 500
    assert failed.json()["error"]["code"] == "logits_processor_failed"


@pytest.mark.parametrize(
    "processors",
    ["ban", [1], [{"name": 1}], [{"name": "ban", "args": {"x": object()}}], [{"name": "ban", "code": "x"}]],
)
def test_what_is_no_list_of_names_and_arguments_is_refused_at_the_call(
    client: Client, processors: Any
) -> None:
    with pytest.raises(InvalidRequest, match="logits_processors"):
        client.generate("x", logits_processors=processors)


def test_guesses_of_the_request_are_refused_beside_them(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="not supported together with draft_token_ids"):
        client.generate("x", logits_processors=[{"name": "ban"}], draft_token_ids=[5])


def test_a_launch_that_speculates_refuses_them_unless_the_request_does_not() -> None:
    speculating = (*SMALL, "--speculative-algorithm", "NGRAM", *PROCESSORS)
    with launched(*speculating) as launch, Client(launch.run_dir) as client:
        with pytest.raises(InvalidRequest, match="speculative_num_draft_tokens"):
            client.generate("x", logits_processors=[{"name": "ban"}], timeout=TIMEOUT_S)
        params = SamplingParams(**GREEDY, speculative_num_draft_tokens=0)
        done = client.generate("x", params, logits_processors=[{"name": "ban"}], timeout=TIMEOUT_S)
        assert len(set(done.token_ids)) == 60


def test_a_launch_with_static_batching_refuses_them_by_name() -> None:
    with launched(*SMALL, "--batching-type", "static") as launch, Client(launch.run_dir) as client:
        for name in ("ban", "batched"):
            with pytest.raises(InvalidRequest, match="not supported with static batching"):
                client.generate("x", logits_processors=[{"name": name}], timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--logits-processor", f"a={OURS}:Missing"], "has no 'Missing'"),
        (["--logits-processor", "a=no.such.module:X"], "there is no module"),
        (["--logits-processor", f"a={OURS}:NotMade"], "RuntimeError: no licence"),
        (["--logits-processor", f"a={OURS}:NotCallable"], "cannot be called"),
        (["--logits-processor", f"{OURS}:BanRepeats"], "is not like name=package.module:Class"),
        ([*PROCESSORS, "--logits-processor", f"ban={OURS}:Force"], "ban is given twice"),
        ([*PROCESSORS, "--batching-type", "static"], "not supported with static batching"),
    ],
)
def test_what_cannot_be_made_ends_the_launch_with_the_flag_named(arguments: list[str], words: str) -> None:
    launch = Launched(*SMALL, *arguments)
    try:
        assert launch.wait_exit(30.0) == 64
        assert "logits_processor" in launch.log()
        assert words in launch.log()
    finally:
        launch.close()


def processes_that_called(folder: Path) -> dict[str, list[str]]:
    return {file.name: file.read_text().splitlines() for file in folder.iterdir()}


def test_ranks_all_call_them_with_the_same_logits(tmp_path: Path) -> None:
    options = (*SMALL, "--max-beam-width", "4", "--tp-size", "2", *PROCESSORS)
    with launched(*options) as launch, Client(launch.run_dir) as client:
        processors: Any = [{"name": "record", "args": {"folder": str(tmp_path)}}, {"name": "ban"}]
        done = client.generate(
            PROMPTS[0], SamplingParams(**GREEDY), logits_processors=processors, timeout=TIMEOUT_S
        )
        assert len(set(done.token_ids)) == 60
        check_search(launch, client, processors)
        called = processes_that_called(tmp_path)
        assert set(called) == {str(launch.pid_of("worker", rank)) for rank in range(2)}
        first, second = called.values()
        assert first == second


@pytest.mark.parametrize("num_steps", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_rank_0_alone_may_call_them_and_the_others_follow(tmp_path: Path, num_steps: int) -> None:
    options = (
        *("--max-beam-width", "4", "--tp-size", "2", "--disable-logits-processor-replicate", *PROCESSORS),
        *("--logits-processor", f"random={OURS}:AtRandom"),
    )
    with launched(*SMALL, *options) as launch, Client(launch.run_dir) as client:
        plain = client.generate(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S).token_ids
        processors: Any = [{"name": "record", "args": {"folder": str(tmp_path)}}, {"name": "random"}]
        params = SamplingParams(**{**GREEDY, "max_tokens": num_steps})
        stream = client.stream(PROMPTS[0], params, logits_processors=processors, timeout=TIMEOUT_S)
        ids = list(next(stream).token_ids)
        beside = client.generate(PROMPTS[1], SamplingParams(**GREEDY), timeout=TIMEOUT_S).token_ids
        ids += [id for delta in stream for id in delta.token_ids]
        assert len(ids) == num_steps
        assert set(ids) <= set(range(40, 90))
        assert list(beside) == list(plain)
        check_search(launch, client, [{"name": "ban"}])
        called = processes_that_called(tmp_path)
        assert list(called) == [str(launch.pid_of("worker", 0))]
        assert json.loads(called[next(iter(called))][-1])[2][1 - num_steps :] == ids[:-1]
