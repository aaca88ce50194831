from __future__ import annotations

import argparse
import enum
import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.flags import FlagError, add_serve_flags, settings_from
from rocserve.flags.arguments import flags_of
from rocserve.settings import ControlMode, EngineSettings, ReadinessRule, ResidencySettings, ServerSettings


def settings(*arguments: str) -> ServerSettings:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    return settings_from(parser.parse_args(arguments))


@pytest.mark.parametrize("name", [flag.names[0] for flag in flags_of(ServerSettings())])
def test_the_help_tells_the_true_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its value is the default of --migraphx-root.
    monkeypatch.delenv("ROCSERVE_MIGRAPHX_ROOT", raising=False)
    flag = next(flag for flag in flags_of(ServerSettings()) if flag.names[0] == name)
    stated = re.search(r"\(default (\S+)\)$", flag.help)
    if flag.default in (None, "", ()):
        assert stated is None
    else:
        assert stated is not None
        value = flag.default.value if isinstance(flag.default, enum.Enum) else flag.default
        assert flag.flag.kind.read(stated[1]) in (value, flag.default)


def test_room_for_models(tmp_path: Path) -> None:
    given = settings(f"--model-repository={tmp_path}", "--max-loaded-models=9", "--max-model-memory=2g")
    assert given.residency == ResidencySettings(max_loaded_models=9, max_model_memory=2 << 30)
    for text in ("0", "1X", "-1", "1.5G"):
        with pytest.raises(SystemExit):
            settings(f"--model-repository={tmp_path}", f"--max-model-memory={text}")


def test_front_ends_are_a_number_or_auto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def front_ends(*flags: str) -> int | None:
        return settings(f"--model-repository={tmp_path}", *flags).front_ends

    assert front_ends() is front_ends("--front-ends=auto") is front_ends("--front-ends=Auto") is None
    assert (front_ends("--front-ends=0"), front_ends("--front-ends=64")) == (0, 64)
    for text in ("some", "-1", "65", "1.5"):
        with pytest.raises(SystemExit):
            front_ends(f"--front-ends={text}")
        assert f"expected auto, or a whole number from 0 to 64, got '{text}'" in capsys.readouterr().err


class _Announced(io.StringIO):
    """Standard error that tells when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        if "\n" in text:
            self.written.set()
        return count


def test_files_of_another_container_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KServe's containers of OCI images link their files when they start, and a link may lead nowhere before."""
    link, folder = tmp_path / "models", tmp_path / "image"
    link.symlink_to(folder)
    with pytest.raises(FlagError, match="there is no file or folder"):
        settings(str(link))
    monkeypatch.setenv("MODEL_INIT_MODE", "async")
    errors = _Announced()
    monkeypatch.setattr(sys, "stderr", errors)

    def bring() -> None:
        errors.written.wait()
        folder.mkdir()

    bringing = threading.Thread(target=bring)
    bringing.start()
    given = settings(str(link))
    bringing.join()
    assert given.repository.roots == (link,)
    assert errors.getvalue() == f"rocserve serve: waiting for '{link}' (MODEL_INIT_MODE=async)\n"


def test_flags_become_settings(tmp_path: Path) -> None:
    given = settings(
        f"--model-store={tmp_path}",
        "--model-control-mode=explicit",
        "--load-model=a",
        "--load-model=b",
        "--strict-readiness=always",
        "--reuse-grpc-port",
        "--grpc-keepalive-time=5000",
        "--log-verbose=1",
    )
    assert given.repository.roots == (tmp_path,)
    assert given.repository.control_mode is ControlMode.EXPLICIT
    assert given.repository.load_models == ("a", "b")
    assert given.repository.readiness is ReadinessRule.ALWAYS
    assert given.grpc.reuse_port
    assert given.grpc.keepalive_time_ms == 5000
    assert given.log.verbose == 1


def test_the_settings_that_engines_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROCSERVE_MIGRAPHX_ROOT", raising=False)
    assert settings(f"--model-repository={tmp_path}").engines == EngineSettings()
    given = settings(f"--model-repository={tmp_path}", "--cache-directory=programs", "--cache-size-bytes=1000")
    assert given.engines == EngineSettings(str(tmp_path / "programs"), 1000)
    monkeypatch.setenv("ROCSERVE_MIGRAPHX_ROOT", "/roots/of/all")
    assert settings(f"--model-repository={tmp_path}").engines.migraphx_root == "/roots/of/all"
    given = settings(f"--model-repository={tmp_path}", "--migraphx-root=/roots/mine")
    assert given.engines.migraphx_root == "/roots/mine"


@pytest.mark.parametrize("given", ["", "DEBUG"])
def test_the_command_keeps_grpcs_messages_out_of_the_log_unless_told_otherwise(given: str) -> None:
    code = "import os; from rocserve.cli import main; main(['status', '--once', '--url', '127.0.0.1:1']);"
    code += "print(os.environ['GRPC_VERBOSITY'])"
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    if given:
        environment["GRPC_VERBOSITY"] = given
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    assert result.stdout.strip() == (given or "ERROR")


def test_older_flags_of_traces(tmp_path: Path) -> None:
    given = settings(
        f"--model-repository={tmp_path}",
        "--trace-file=/tmp/trace.json",
        "--trace-level=TIMESTAMPS",
        "--trace-config=rate=7",
        "--trace-count=5",
        "--trace-log-frequency=2",
    )
    assert given.trace == (
        ("triton", "file", "/tmp/trace.json"),
        ("", "level", "TIMESTAMPS"),
        ("", "rate", "7"),
        ("", "count", "5"),
        ("triton", "log-frequency", "2"),
    )


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        (
            "--model-repository=s3://bucket//models",
            "expected s3://BUCKET[/PREFIX], s3://HOST:PORT/BUCKET[/PREFIX] or s3://https://HOST[:PORT]/BUCKET[/PREFIX],"
            " got 's3://bucket//models'",
        ),
        ("--http-port=70000", "expected at most 65535, got '70000'"),
        ("--grpc-port=65536", "expected at most 65535, got '65536'"),
        ("--metrics-port=-1", "expected at least 0, got '-1'"),
        ("--grpc-keepalive-time=99999999999", "expected at most 2147483647, got '99999999999'"),
        ("--grpc-max-message-bytes=4294967296", "expected at most 2147483647, got '4294967296'"),
        ("--worker-memory-bytes=1000000000000000000", "expected at most 999999999999999999, got '1000000000000000000'"),
        ("--worker-tasks=1000000000000000000", "expected at most 999999999999999999, got '1000000000000000000'"),
        ("--worker-file-bytes=1000000000000000000", "expected at most 999999999999999999, got '1000000000000000000'"),
        ("--exit-timeout-secs=nan", "expected at least 0, got 'nan'"),
        ("--host-policy=gpu_0", "expected POLICY,SETTING=VALUE, got 'gpu_0'"),
        ("--host-policy=numa-node=0", "expected POLICY,SETTING=VALUE, got 'numa-node=0'"),
        ("--cache-config=local", "expected local,size=BYTES, got 'local'"),
        ("--response-cache-byte-size=1M", "expected a whole number, got '1M'"),
        ("--http-port=80.5", "expected a whole number, got '80.5'"),
        ("--exit-timeout-secs=soon", "expected a number, got 'soon'"),
        ("--cache-config=size=100", "expected local,size=BYTES, got 'size=100'"),
        ("--max-connection-age-secs=inf", "expected at most 2147483, got 'inf'"),
        ("--max-connection-age-secs=1e10", "expected at most 2147483, got '1e10'"),
        ("--repository-settle-secs=inf", "expected at most 2147483, got 'inf'"),
        ("--repository-settle-secs=1e10", "expected at most 2147483, got '1e10'"),
        ("--model-repository=", "expected a path or a URL, got ''; is a variable of the shell not set?"),
        ("", "expected a path or a URL, got ''; is a variable of the shell not set?"),
    ],
)
def test_values_that_cannot_be(flag: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings(f"--model-repository={tmp_path}", flag)
    assert capsys.readouterr().err.endswith(f": {text}\n")


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(" * 3000])
def test_a_pattern_of_headers_must_be_a_regular_expression(pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--model-repository=.", f"--grpc-header-forward-pattern={pattern}")
    assert f"expected a regular expression, got '{pattern}'" in capsys.readouterr().err


HERE = "--model-repository=."


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "name what to serve: a model's file, its folder, or a repository"),
        (["none.onnx"], "there is no file or folder 'none.onnx'"),
        (["net.pth"], ", or a folder; such files hold weights without the network: write it as a program with torch"),
        (["model.cbm"], ", or a folder; convert such a model to ONNX, with skl2onnx (scikit-learn), "),
        (["notes.txt"], "'notes.txt' has no model file's ending; expected .mxr, .onnx, "),
        ([".", "--model-name=m"], "'.' is a repository, whose models set it in their folders"),
        (["net.onnx", HERE], "'net.onnx' and --model-repository both name what to serve"),
        (["net.onnx", "--model-control-mode=explicit"], "is for repositories, but 'net.onnx' is one model"),
        ([HERE, "--model-name=m"], "--model-name is for one model"),
        (["--model-repository=none"], "--model-repository=none: there is no such folder"),
        ([HERE, "--allow-worker-load=none"], "--allow-worker-load=none: there is no such folder"),
        (
            [HERE, "--allow-vertex-ai"],
            "--allow-vertex-ai=true is not supported here: rocserve has no Vertex AI front end; remove",
        ),
        (
            [HERE, "--allow-sagemaker=true"],
            "--allow-sagemaker=true is not supported here: rocserve has no SageMaker front end; remove",
        ),
        (
            [HERE, "--response-cache-byte-size=9", "--cache-config=local,size=9"],
            "Incompatible flags --response-cache-byte-size and --cache-config both provided",
        ),
        ([HERE, "--cache-directory=caches"], "this is tritonserver's folder of response caches"),
        ([HERE, "--cache-directory=/opt/tritonserver/caches"], "this is tritonserver's folder of response caches"),
        ([HERE, "--allow-remote-models"], "--allow-remote-models needs --allow-remote-files"),
        ([HERE, "--grpc-use-ssl=true"], "TLS needs --grpc-server-cert and --grpc-server-key"),
        ([HERE, "--load-model=a"], "--load-model needs --model-control-mode=explicit"),
        ([HERE, "--grpc-use-ssl", "--grpc-server-cert=none"], "--grpc-server-cert=none: there is no such file"),
        ([HERE, "--grpc-use-ssl", "--grpc-server-key=none"], "--grpc-server-key=none: there is no such file"),
        ([HERE, "--grpc-use-ssl", "--grpc-root-cert=none"], "--grpc-root-cert=none: there is no such file"),
        (
            [HERE, "--grpc-restricted-protocol=trace:one=1", "--grpc-restricted-protocol=logging,trace:two=2"],
            "restricted protocol 'trace' can not be specified in multiple config groups",
        ),
        (
            [HERE, "--http-restricted-api=trace:one=1", "--http-restricted-api=logging,trace:two=2"],
            "restricted api 'trace' can not be specified in multiple config groups",
        ),
        ([HERE, "--http-restricted-api=trace:a@file=/absent"], "there is no file /absent with the value of 'a'"),
        (
            [HERE, "--trace-config=rate=often"],
            "--trace-config: rate=often: expected a whole number from 0 to 4294967295",
        ),
        ([HERE, "--trace-level=ALL"], "--trace-config: invalid value for trace level option: ALL; expected OFF"),
        ([HERE, "--trace-config=jaeger,url=x"], "--trace-config: invalid value for trace mode option: jaeger"),
    ],
)
def test_words_that_contradict_each_other_or_what_is_there(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "net.onnx").touch()
    (tmp_path / "net.pth").touch()
    (tmp_path / "model.cbm").touch()
    (tmp_path / "caches" / "local").mkdir(parents=True)
    (tmp_path / "caches" / "local" / "libtritoncache_local.so").touch()
    with pytest.raises(FlagError, match=re.escape(text)):
        settings(*words)


def test_what_is_there_or_switched_off_is_taken(tmp_path: Path) -> None:
    off = ("--allow-vertex-ai=false", "--allow-sagemaker=false")
    allowed = settings(f"--model-repository={tmp_path}", f"--allow-worker-load={tmp_path}", *off)
    assert allowed.repository.worker_load_folders == (tmp_path,)
    missing = tmp_path / "models"
    assert settings(f"--model-repository={missing}", "--exit-on-error=false").repository.roots == (missing,)


@pytest.mark.parametrize(("word", "verbose"), [("true", 1), ("True", 1), ("false", 0), ("3", 3)])
def test_values_as_tritonserver_reads_them(word: str, verbose: int, tmp_path: Path) -> None:
    given = settings(
        f"--model-repository={tmp_path}",
        f"--log-verbose={word}",
        "--model-control-mode=EXPLICIT",
        "--grpc-infer-response-compression-level=High",
        "--log-format=iso8601",
    )
    assert given.log.verbose == verbose
    assert given.repository.control_mode is ControlMode.EXPLICIT
    assert (given.grpc.infer_response_compression_level, given.log.format) == ("high", "ISO8601")


def test_the_older_flag_of_the_response_cache(tmp_path: Path) -> None:
    assert (
        settings(f"--model-repository={tmp_path}", "--response-cache-byte-size=1048576").response_cache_bytes == 1 << 20
    )


def test_files_without_a_name_are_left_out(tmp_path: Path) -> None:
    names = ("grpc-server-cert", "grpc-server-key", "grpc-root-cert", "log-file")
    read = settings(f"--model-repository={tmp_path}", *(f"--{name}=" for name in names))
    assert (read.grpc.server_cert, read.grpc.server_key, read.grpc.root_cert, read.log.file) == (None,) * 4


def test_secrets_of_restricted_protocols_may_be_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    monkeypatch.setenv("TEST_KEY", "@file=y")
    found = settings(
        f"--model-repository={tmp_path}",
        f"--grpc-restricted-protocol=trace:a@file={secret}",
        "--grpc-restricted-protocol=logging:b@env=TEST_KEY",
        "--grpc-restricted-protocol=health:c=@file=/literal",
    )
    assert [(group.header, group.value, group.file) for group in found.grpc.restricted] == [
        ("a", "", secret),
        ("b", "@file=y", None),
        ("c", "@file=/literal", None),
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("trace:a@env=NO_SUCH_VARIABLE", "the environment variable 'NO_SUCH_VARIABLE' is not set, or empty"),
        ("trace:a@dir=secret", "expected PROTOCOL"),
        ("trace:a=", "expected a value of the header 'a', got an empty one, which anybody could send"),
        ("trace:secret", "expected PROTOCOL"),
    ],
)
def test_what_is_wrong_with_a_secret_is_said_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, text: str
) -> None:
    with pytest.raises(SystemExit):
        settings(f"--model-repository={tmp_path}", f"--grpc-restricted-protocol={value}")
    message = capsys.readouterr().err
    assert text in message
    assert "secret" not in message.rpartition("error:")[2]


@pytest.mark.parametrize("value", ["", "everybody", "10.0.0.1/8", "local,any", "local;10.0.0.1"])
def test_wrong_admin_addresses(tmp_path: Path, value: str) -> None:
    with pytest.raises(SystemExit):
        settings(f"--model-repository={tmp_path}", f"--admin-address={value}")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--grpc-address=unix:/a", "--front-ends=2"), "--front-ends=2: the kernel cannot share unix:/a"),
        (("--grpc-address=unix:/a", "--http-address=unix:///a,mode=0660"), "unix:/a is the address of two"),
        (("--http-address=unix:/a", "--metrics-address=unix:/a"), "unix:/a is the address of two"),
        (("--http-address=unix:/a", "--reuse-http-port"), "is a Unix socket, not a port; remove --reuse-http-port"),
    ],
)
def test_unix_sockets_that_cannot_be_served(tmp_path: Path, flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(FlagError, match=text):
        settings(f"--model-repository={tmp_path}", *flags)


def test_unix_sockets_that_can_be_served(tmp_path: Path) -> None:
    flags = ("--grpc-address=unix:/a", "--http-address=unix:/a", "--allow-http=false", "--front-ends=0")
    assert str(*settings(f"--model-repository={tmp_path}", *flags).unix_sockets) == "unix:/a"


@pytest.mark.parametrize("flag", ["", "--model-repository="])
def test_a_name_that_no_file_can_have(flag: str) -> None:
    name = "x" * 300
    with pytest.raises(FlagError, match=f"'{name}' cannot be read: File name too long"):
        settings(f"{flag}{name}")


def test_the_home_of_nobody_stays_a_name(tmp_path: Path) -> None:
    given = settings(f"--model-repository={tmp_path}", "--cache-directory=~nobody-here/cache")
    assert given.engines.cache_directory.endswith("/~nobody-here/cache")


@pytest.mark.parametrize("flag", ["--id", "--model-name", "--load-model"])
def test_names_are_utf8(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("m.onnx", f"{flag}=name-\udcff")
    assert f"argument {flag}: expected text in UTF-8, got 'name-\\udcff'" in capsys.readouterr().err
