"""``ickpt`` as a process: what it loads, terminals, pipes, signals and streams."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from incremental_ckpt import Checkpointer

ROOT = Path(__file__).parents[2]
ICKPT = [sys.executable, "-m", "incremental_ckpt"]
VERBS = ("ls", "show", "check")
COLOUR = "\x1b["


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "17"
    model = torch.nn.ModuleDict({"größe": torch.nn.EmbeddingBag(100, 4, sparse=True)})
    with Checkpointer(model, place, kind="full") as ckpt:
        ckpt.resume_from_checkpoint()
        for step in range(3):
            ckpt.save_checkpoint(step, loss=0.5).wait()
    return place


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error", **more}


def run(
    *args: object, env: Mapping[str, str] | None = None, stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    command = [*ICKPT, *map(str, args)]
    return subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=env or environment(),
        check=False,
    )


def script(text: str, *args: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env or environment(), check=False)


def on_a_terminal(args: Sequence[object], env: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and all that the terminal showed."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*ICKPT, *map(str, args)], stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
        except OSError:
            pass  # Linux: the other end is closed
        finally:
            os.close(ours)
    return process.returncode, shown.decode()


LOADED = """
import sys
from incremental_ckpt.cli import main
code = main(sys.argv[2:])
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_loads_torch_and_json_loads_no_rich(place: Path, verb: str) -> None:
    unwanted = "torch,torchrec,fbgemm_gpu,boto3"
    drawn = script(LOADED, unwanted, verb, place)
    as_json = script(LOADED, f"{unwanted},rich", verb, place, "--json")
    assert (drawn.returncode, drawn.stderr) == (as_json.returncode, as_json.stderr) == (0, "\n")
    assert json.loads(as_json.stdout)


@pytest.mark.parametrize("args", [[], ["--json"]], ids=["", "json"])
def test_a_listing_of_a_folder_loads_no_arrays_no_log_and_nothing_that_draws(place: Path, args: list[str]) -> None:
    done = script(
        LOADED, "torch,numpy,rich,logging,pyroaring,xxhash,incremental_ckpt.repository.core", "ls", place, *args
    )
    assert (done.returncode, done.stderr) == (0, "\n")


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_load_neither_numpy_nor_rich(option: str) -> None:
    done = script(LOADED, "torch,numpy,rich,incremental_ckpt.repository,incremental_ckpt.storage", option)
    assert (done.returncode, done.stderr) == (0, "\n")
    assert done.stdout


def test_the_version_is_that_of_the_installed_distribution(tmp_path: Path) -> None:
    installed = tmp_path / "incremental_ckpt-9.8.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: incremental-ckpt\nVersion: 9.8.7\n")
    done = run("--version", env=environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "ickpt 9.8.7\n", "")


def test_the_entry_point_is_the_same_main() -> None:
    import tomllib

    from incremental_ckpt.cli import main

    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["ickpt"].split(":")
    assert getattr(__import__(module, fromlist=[name]), name) is main


def test_an_error_is_one_line_on_stderr_and_an_exit_code(tmp_path: Path) -> None:
    done = run("check", tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"ickpt: .*nowhere does not exist.*\n", done.stderr)


@pytest.mark.parametrize("verb", ["ls", "show"])
def test_colours_are_for_terminals(place: Path, verb: str) -> None:
    code, shown = on_a_terminal([verb, place], environment(TERM="xterm-256color"))
    assert code == 0
    assert COLOUR in shown
    piped = run(verb, place, env=environment(TERM="xterm-256color", FORCE_COLOR="1", CLICOLOR_FORCE="1"))
    assert (piped.returncode, piped.stderr) == (0, "")
    assert COLOUR not in piped.stdout


def test_a_terminal_that_asks_for_no_colour_gets_none(place: Path) -> None:
    _, shown = on_a_terminal(["ls", place], environment(TERM="xterm-256color", NO_COLOR="1"))
    assert "\x1b[36m" not in shown
    _, dumb = on_a_terminal(["ls", place], environment(TERM="dumb"))
    assert COLOUR not in dumb


def test_a_narrow_terminal_loses_no_digit(place: Path) -> None:
    code, shown = on_a_terminal(["ls", place], environment(TERM="dumb", COLUMNS="60"))
    assert code == 0
    *table, _, left_out = shown.splitlines()
    assert [line.split()[:3] for line in table] == [["seq", "step", "kind"]] + [
        [str(n), str(n - 1), "base"] for n in (1, 2, 3)
    ]
    assert len({len(line) for line in table}) == 1
    assert len(table[0]) <= 60
    assert "…" not in shown
    assert left_out == "too narrow for: rows, of all (--json, or a pipe, has all)"
    assert "rows   of all" in run("ls", place, env=environment(COLUMNS="60")).stdout


def test_check_shows_its_progress_on_a_terminal_only(place: Path) -> None:
    code, shown = on_a_terminal(["check", place], environment(TERM="xterm-256color"))
    assert code == 0
    assert "3/3" in shown
    assert shown.endswith("all can be restored: 1-3\x1b[0m\r\n")
    piped = run("check", place)
    assert (piped.stderr, len(piped.stdout.splitlines())) == ("", 2)


@pytest.mark.parametrize("args", [["ls"], ["ls", "--json"], ["--help"]], ids=" ".join)
def test_a_closed_pipe_ends_it_quietly(place: Path, args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(*args, *([] if args == ["--help"] else [place]), stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("args", [["ls"], ["ls", "--json"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_line(place: Path, args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(*args, place, stdout=full.fileno())
    assert (done.returncode, done.stderr) == (1, "ickpt: cannot write the output: No space left on device\n")


def test_closed_streams_are_no_fault(place: Path, tmp_path: Path) -> None:
    shell = 'exec "$@" {0}'
    for closed, path, code in ((">&-", place, 0), ("2>&-", tmp_path / "nowhere", 3)):
        command = ["sh", "-c", shell.format(closed), "sh", *ICKPT, "ls", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
        assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_an_encoding_that_lacks_a_letter_is_no_fault(place: Path) -> None:
    done = run("show", place, env=environment(PYTHONIOENCODING="ascii"))
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfe" in done.stdout
    assert "größe" in run("show", place).stdout


WAITING = """
import atexit, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
from incremental_ckpt.cli import main, places
at, *args = sys.argv[1:]
def wait(word):
    print(word, flush=True)
    while True:
        signal.pause()
def open_store(url, read_only):
    try:
        wait("opening")
    finally:
        if at == "cleaning up":
            wait(at)
if at == "exiting":
    atexit.register(wait, at)
places.open_store = open_store
sys.exit(main(args))
"""


def interrupt_at(moments: Sequence[str], *args: object) -> tuple[int, str]:
    """Exit code and stderr of a command that gets Ctrl-C at each of these moments, which the last one ends."""
    command = [sys.executable, "-c", WAITING, moments[-1], *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        for moment in moments:
            assert process.stdout.readline() == f"{moment}\n"
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    return process.returncode, err


COMMANDS = {
    "ls": ("{store}",),
    "show": ("{store}",),
    "check": ("{store}",),
    "compact": ("{store}",),
    "prune": ("{store}", "--keep-last", "1"),
    "export": ("{store}", "{out}"),
    "import": ("{out}", "{store}"),
    "diff": ("{store}", "1", "2"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_ctrl_c_and_another_one_are_answered_in_one_line(place: Path, tmp_path: Path, verb: str) -> None:
    args = [verb, *(arg.format(store=place, out=tmp_path / "out") for arg in COMMANDS[verb])]
    assert interrupt_at(["opening", "cleaning up"], *args) == (130, "ickpt: interrupted\n")


def test_one_ctrl_c_is_enough(place: Path) -> None:
    assert interrupt_at(["opening"], "ls", place) == (130, "ickpt: interrupted\n")


def test_ctrl_c_while_it_exits_adds_no_line(place: Path) -> None:
    assert interrupt_at(["opening", "exiting"], "ls", place) == (130, "ickpt: interrupted\n")


def test_who_ignores_ctrl_c_is_not_interrupted(place: Path) -> None:
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", IGNORING, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 checkpoints" in done.stdout


IGNORING = """
import os, signal, sys
from incremental_ckpt.cli import main, places
open_store = places.open_store
def interrupted(url, read_only):
    os.kill(os.getpid(), signal.SIGINT)
    return open_store(url, read_only=read_only)
places.open_store = interrupted
sys.exit(main(["ls", sys.argv[1]]))
"""


INTERRUPTED_IMPORT = """
import sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from incremental_ckpt.cli import main
sys.exit(main(["ls", sys.argv[2]]))
"""


@pytest.mark.parametrize("module", ["click", "incremental_ckpt.storage"])
def test_ctrl_c_while_it_is_still_loading_is_answered_too(place: Path, module: str) -> None:
    done = script(INTERRUPTED_IMPORT, module, place)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ickpt: interrupted\n")


COMPLETIONS = [
    ("ickpt l", 1, {"plain,ls"}),
    ("ickpt ls --", 2, {"plain,--json", "plain,--help"}),
    ("ickpt ls r", 2, {"dir,r"}),
    ("ickpt export runs/17 out --format ", 5, {"plain,torch", "plain,safetensors", "plain,dcp"}),
    ("ickpt import m", 2, {"file,m"}),
]


@pytest.mark.parametrize(("line", "word", "offered"), COMPLETIONS, ids=[line for line, _, _ in COMPLETIONS])
def test_a_shell_is_offered_what_can_come_next(line: str, word: int, offered: set[str]) -> None:
    done = run(env=environment(_ICKPT_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(word)))
    assert (done.returncode, done.stderr) == (0, "")
    assert set(done.stdout.splitlines()) == offered


def test_a_shell_is_given_the_function_that_completes() -> None:
    done = run(env=environment(_ICKPT_COMPLETE="zsh_source"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "_ICKPT_COMPLETE=zsh_complete" in done.stdout
    assert (
        subprocess.run(
            ["bash", "-n"], input=run(env=environment(_ICKPT_COMPLETE="bash_source")).stdout, text=True
        ).returncode
        == 0
    )
