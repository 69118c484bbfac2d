"""Runs command lines in forked children, with faults at chosen places: a signal, a full disk, a failing device.

A server process imports vitrail once and forks for each command, which costs milliseconds instead of seconds. It reads
cases as lines of JSON and answers in lines of JSON. Run as a program, this file is that server.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import privileges

from vitrail.verbs import VERBS

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# What commands import anyway. Nothing is computed in the server: threads do not survive a fork.
PRELOADED = (
    *("matplotlib.pyplot", "onnxruntime", "pyarrow.parquet", "sklearn.datasets", "tensorboardX", "vitrail.cli"),
    *("onnxscript", "sympy", "torch.onnx._internal.exporter._core"),
    *(f"vitrail.verbs.{verb}" for verb in VERBS),
    *("vitrail.evaluate.embed", "vitrail.explain", "vitrail.export.write", "vitrail.report.write"),
    "vitrail.train.folds",
)
ROOM = 4 * 2**30  # bytes of address space beyond that of the server


# A bind mount in a mount namespace of its own; then runs the command that follows.
_MOUNTED = ["unshare", "-rm", "sh", "-ec", 'mount --bind "$0" "$0"; mount -o remount,ro,bind "$0"; exec "$@"']


def can_mount(folder: Path) -> bool:
    """Whether a folder can be made read-only here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_MOUNTED, str(folder), "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Case:
    """A command, where it runs, and the fault that strikes it."""

    words: list[str]
    folder: str
    fault: str = ""  # "kill" or "term" at a change of the file system, "full" from a write on, "io" at a write
    at: int = 0  # the number of that change or write, from 1
    seconds: float = 60.0  # of computing, or of waiting, after which it counts as hanging
    environment: dict[str, str] = field(default_factory=dict)
    unprivileged: bool = False  # permissions do not bind root otherwise
    where: str = ""  # a regular expression: only changes of and writes to such paths count
    plain: bool = False  # without figures and report


@dataclass(frozen=True)
class Answer:
    """What became of a command."""

    code: int  # exit code; negative: the signal that ended it
    out: str
    error: str
    hung: bool
    seconds: float
    peak: int  # bytes of memory beyond that of the server
    changes: int  # of the file system
    writes: int

    @property
    def sentence(self) -> str:
        """The last line on stderr."""
        return (self.error.strip().splitlines() or [""])[-1]

    def trouble(self) -> str:
        """Why this is no proper end of a command; empty if it is one."""
        if self.hung:
            return f"hung for {self.seconds:.0f} s"
        if "Traceback" in self.error or "A fault of vitrail" in self.error or "Logging error" in self.error:
            return f"a fault: {self.error[-1500:]}"
        if self.code not in (0, 1, 2, 130):
            return f"exit code {self.code}: {self.error[-500:]}"
        if self.code == 2 and not self.sentence.startswith("vitrail: "):
            return f"no sentence: {self.error[-500:]}"
        return ""


class Forks:
    """The server, as a context. A folder may be read-only for it, and only for it: permissions do not bind root."""

    def __init__(self, read_only: Path | None = None):
        self._prefix = [] if read_only is None else [*_MOUNTED, str(read_only)]

    def __enter__(self) -> Forks:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [*self._prefix, sys.executable, "-B", __file__]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def __call__(self, case: Case) -> Answer:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asdict(case)) + "\n")
        self._server.stdin.flush()
        return Answer(**json.loads(self._server.stdout.readline()))


# In the child


class Faults:
    """Counts changes of the file system and writes, and strikes at one of them."""

    def __init__(self, case: Case):
        self.case = case
        self.changes = self.writes = 0

    def install(self) -> None:
        sys.addaudithook(self._hook)
        real = io.open

        def opened(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
            stream = real(file, mode, *more, **named)
            return _Stream(stream, self) if set(mode) & set("wax+") and self._counts(file) else stream

        io.open = builtins.open = opened  # type: ignore[assignment]

    def _hook(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(given[2], int) and given[2] & WRITING
        if not (event in CHANGES or writes) or not self._counts(given[0]):
            return
        self.changes += 1
        if self.case.fault in SIGNALS and self.changes == self.case.at:
            os.kill(os.getpid(), SIGNALS[self.case.fault])

    def _counts(self, path: Any) -> bool:
        """Whether a file is one on disk, and one of the case's; an integer is a descriptor that is open already."""
        if isinstance(path, int) or os.fsdecode(path).startswith(("/dev/", "/proc/", "/sys/")):
            return False
        return re.search(self.case.where, os.fsdecode(path)) is not None

    def before_write(self, stream: Any, data: Any) -> None:
        self.writes += 1
        full = self.case.fault == "full" and self.writes >= self.case.at
        if full or (self.case.fault == "io" and self.writes == self.case.at):
            with contextlib.suppress(Exception):
                stream.write(data[: len(data) // 2])  # what still fits
            number = errno.ENOSPC if full else errno.EIO
            raise OSError(number, os.strerror(number))


class _Stream:
    """A file open for writing, whose writes are counted."""

    def __init__(self, stream: Any, faults: Faults):
        self._stream, self._faults = stream, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def __iter__(self) -> Any:
        return iter(self._stream)

    def write(self, data: Any) -> Any:
        self._faults.before_write(self._stream, data)
        return self._stream.write(data)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def undrawn() -> None:
    """From now on, runs of this process draw no figures and write no report."""
    from vitrail.evaluate import measure
    from vitrail.train import journal
    from vitrail.verbs import train
    from vitrail.verbs.run import Run

    measure.save_charts = journal.save_charts = lambda *_: None  # type: ignore[attr-defined]  # imported there
    train.reported = Run


def child(case: Case, notes: str) -> None:
    """Runs the command of a case in this process, which then ends."""
    os.chdir(case.folder)
    os.environ.update(case.environment)
    for number, name in ((1, "out"), (2, "error")):
        os.dup2(os.open(f"{notes}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from vitrail import cli

    if case.unprivileged:
        privileges.drop()
    if case.plain:
        undrawn()
    faults = Faults(case)
    faults.install()
    code = 1
    try:
        cli.main(case.words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:  # one that `main` let through
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    descriptor = os.open(f"{notes}.counts", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, f"{faults.changes} {faults.writes}".encode())
    os._exit(code)


# In the server


def hangs(pid: int, seconds: float) -> bool:
    """Waits for a child process. It hangs if it computes for `seconds`, or for less than one of as many that pass.

    On a busy machine a command takes long and does not hang.
    """
    handle, used, since = os.pidfd_open(pid), 0.0, time.monotonic()
    try:
        while not select.select([handle], [], [], 0.5)[0]:
            now = _computed(pid)
            if now >= used + 1:
                used, since = now, time.monotonic()
            if now > seconds or time.monotonic() - since > seconds:
                return True
        return False
    finally:
        os.close(handle)


def _computed(pid: int) -> float:
    """Seconds of processor time of a process and of the children that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def run(case: Case, notes: str) -> Answer:
    """Forks, waits and reports."""
    Path(f"{notes}.counts").write_text("0 0")
    begun = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            child(case, notes)
        finally:
            os._exit(99)
    hung = hangs(pid, case.seconds)
    if hung:
        os.killpg(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    changes, writes = map(int, Path(f"{notes}.counts").read_text().split())
    out, error = (Path(f"{notes}.{name}").read_bytes().decode(errors="backslashreplace") for name in ("out", "error"))
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Answer(
        os.waitstatus_to_exitcode(status),
        out[-4000:],
        error[-4000:],
        hung,
        time.monotonic() - begun,
        max(usage.ru_maxrss - own, 0) * 1024,
        changes,
        writes,
    )


def serve() -> None:
    for name in PRELOADED:
        import_module(name)
    # Answers go to the real stdout; nothing else may.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            answers.write(json.dumps(asdict(run(Case(**json.loads(line)), f"{folder}/case"))) + "\n")
            answers.flush()


if __name__ == "__main__":
    serve()
