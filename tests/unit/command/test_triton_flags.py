"""tritonserver's flags: each has its effect, is accepted with a reason, or is refused with what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from support.parity.flags import recorded_flags

from rocserve.cli import main
from rocserve.flags import FlagError, add_serve_flags, settings_from
from rocserve.flags.arguments import flags_of
from rocserve.flags.spelling import meant_flag
from rocserve.flags.tritonserver import TRITON_FLAGS, Handling, TritonFlag, without_effect
from rocserve.settings import ServerSettings

RECORDED = recorded_flags()
ADDED_LATER = (
    "allow-client-shm",
    "grpc-infer-cq-count",
    "grpc-infer-thread-count",
    "grpc-max-response-pool-size",
    "http-max-input-size",
)
NEEDED = {name for flag in flags_of(ServerSettings()) for name in flag.names}
UNNEEDED = [one for one in TRITON_FLAGS.values() if one.handling is Handling.UNNEEDED]
REFUSED = [one for one in TRITON_FLAGS.values() if one.handling is Handling.REFUSED]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    return parser.parse_args(words)


def name_of(flag: TritonFlag) -> str:
    return flag.name


def test_every_flag_is_in_the_table() -> None:
    assert len(RECORDED) == 87
    assert {*RECORDED, *ADDED_LATER} <= TRITON_FLAGS.keys()
    served = {name for name, one in TRITON_FLAGS.items() if one.handling is Handling.SERVED}
    assert served - {"help"} == TRITON_FLAGS.keys() & NEEDED
    assert all(bool(one.text) == (one.handling is not Handling.SERVED) for one in TRITON_FLAGS.values())


@pytest.mark.parametrize("flag", UNNEEDED, ids=name_of)
def test_a_flag_without_effect_is_accepted_and_says_why(flag: TritonFlag, tmp_path: Path) -> None:
    given = parsed(str(tmp_path), f"--{flag.name}=1", f"--{flag.name}=2")
    settings_from(given)
    assert without_effect(given) == [f"--{flag.name} has no effect: {flag.text}"]


@pytest.mark.parametrize("flag", REFUSED, ids=name_of)
def test_a_refused_flag_says_what_to_do(flag: TritonFlag, tmp_path: Path) -> None:
    with pytest.raises(FlagError) as refused:
        settings_from(parsed(str(tmp_path), f"--{flag.name}=1"))
    assert str(refused.value) == f"--{flag.name}=1 is not supported here: {flag.text}"
    # The flags that it names exist.
    advised = {word.strip(",;:()").partition("=")[0] for word in flag.text.split() if word.startswith("--")}
    assert advised <= {f"--{name}" for name in NEEDED | {flag.switch}}


def test_what_is_off_is_accepted(tmp_path: Path) -> None:
    given = parsed(str(tmp_path), "--allow-sagemaker=False", "--sagemaker-port=8080", "--allow-vertex-ai=0")
    settings_from(given)
    assert without_effect(given) == ["--sagemaker-port has no effect: --allow-sagemaker is false"]
    with pytest.raises(
        FlagError, match="--vertex-ai-port=1 is not supported here: rocserve has no Vertex AI front end"
    ):
        settings_from(parsed(str(tmp_path), "--allow-sagemaker=false", "--vertex-ai-port=1"))


@pytest.mark.parametrize("flag", [one for one in TRITON_FLAGS.values() if one.is_boolean], ids=name_of)
def test_a_boolean_stands_alone_and_takes_no_word(flag: TritonFlag, tmp_path: Path) -> None:
    given = parsed(str(tmp_path), f"--{flag.name}")
    assert given.what == tmp_path
    assert getattr(given, f"tritonserver.{flag.name}") == ["true"]


@pytest.mark.parametrize("flag", [*UNNEEDED, *REFUSED], ids=name_of)
def test_no_flag_of_tritonserver_is_taken_for_another(flag: TritonFlag) -> None:
    assert not meant_flag(f"--{flag.name}", [f"--{name}" for name in NEEDED])


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--model-repo", "--model-repository"),
        ("--model-repositry", "--model-repository"),
        ("--model_repository", "--model-repository"),
        ("--exit-timeout-seconds", "--exit-timeout-secs"),
        ("--load-models", "--load-model"),
        ("--lables", "--labels"),
        ("--max-queue-request", "--max-queue-requests"),
        # The words of other servers, and of other flags.
        ("--port", ""),
        ("--rest_api_port", ""),
        ("--model_config_file", ""),
        ("--max-batch-size", ""),
        ("--log-level", ""),
        ("--grpc-thread-count", ""),
        ("--grpc-max-input-size", ""),
        ("--min-queue-requests", ""),
        ("--http-timeout-secs", ""),
        # Several flags begin so.
        ("--grpc", ""),
        ("--trace", ""),
        ("", ""),
    ],
)
def test_only_another_spelling_is_suggested(word: str, meant: str) -> None:
    assert meant_flag(word, [f"--{name}" for name in NEEDED]) == meant


@pytest.mark.parametrize("word", ["--http-thread-counts", "--vertex-ai-ports", "--help-me"])
def test_a_flag_without_effect_is_not_suggested(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(("serve", "models", f"{word}=1"))
    assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: {word}=1\n")
