"""What stands in for `qkform train` in tests of sweeps: the same arguments, folder, lock and record, and no training.

STUB_LOG     a file that gets a JSON line when a process begins and when it ends
STUB_PAUSE   seconds per step
STUB_FAIL    ARM/seed-N=K,...: that run fails at step 2 in its first K processes
STUB_DEAF    no signal but SIGKILL ends it
STUB_NAN     ARM/seed-N: that run ends as one whose loss is no number
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

LOSSES = {"standard": 0.1, "matched": 0.2}


def main() -> int:
    file, out = Path(sys.argv[1]), Path(sys.argv[3])
    resume = sys.argv[4:] == ["--resume"]
    name = f"{out.parent.name}/{out.name}"
    out.mkdir(exist_ok=True)
    lock = (out / ".lock").open("w")
    if os.environ.get("STUB_DEAF"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("another training writes to this folder")
        return 3
    note(
        name,
        "begin",
        resume=resume,
        threads=os.environ.get("OMP_NUM_THREADS"),
        device=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    code = 1
    try:
        code = train(file, out, resume, name)
    except KeyboardInterrupt:
        code = 130
    finally:
        note(name, "end", code=code)
    return code


def train(file: Path, out: Path, resume: bool, name: str) -> int:
    if resume != (out / "experiment.yaml").exists():
        print("--resume where there is nothing to go on with, or none where there is")
        return 2
    text = file.read_text()
    experiment: dict[str, Any] = {
        k: json.loads(v) for k, _, v in (line.partition(": ") for line in text.splitlines())
    }
    (out / "experiment.yaml").write_text(text)
    record = out / "record.jsonl"
    lines = record.read_text().splitlines() if record.exists() else []
    steps = [json.loads(line) for line in lines if '"event"' not in line]
    first = steps[-1]["step"] + 1 if steps else 0
    with record.open("a") as file_out:
        say = lambda line: (file_out.write(json.dumps(line) + "\n"), file_out.flush())  # noqa: E731
        if not lines:
            say(
                {
                    "event": "start",
                    "schema": "qkform.run/1",
                    "step": 0,
                    "experiment": experiment,
                    "environment": {},
                    "layers": [],
                }
            )
        elif first:
            say({"event": "resume", "step": first - 1, "exact": True, "reason": None, "environment": {}})
        for step in range(first, experiment["steps"] + 1):
            time.sleep(float(os.environ.get("STUB_PAUSE", 0)))
            if step == 2 and fails(name):
                print("step 2\nTrainingError: no space left on the moon")
                return 1
            held_out = 5.0 - LOSSES.get(out.parent.name, 0.1) * step - 0.01 * experiment["seed"]
            say(
                {
                    "step": step,
                    "loss": held_out,
                    "held_out": held_out,
                    "tokens": 64 * step,
                    "rates": {},
                    "layers": [],
                    "seconds": 0.5 * step,
                }
            )
        nan = os.environ.get("STUB_NAN") == name
        say({"event": "end", "step": experiment["steps"], "reason": "nan" if nan else "finished"})
    if nan:
        print("TrainingError: the loss is no number")
        return 2
    (out / "model").mkdir()
    return 0


def fails(name: str) -> bool:
    asked = dict(
        part.split("=") for part in os.environ.get("STUB_FAIL", "").split(",") if part and "/" in part
    )
    begun = [one for one in noted() if (one["name"], one["what"]) == (name, "begin")]
    return len(begun) <= int(asked.get(name, 0))


def noted() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(os.environ["STUB_LOG"]).read_text().splitlines()]


def note(name: str, what: str, **more: Any) -> None:
    line = json.dumps({"name": name, "what": what, "pid": os.getpid(), "at": time.monotonic(), **more}) + "\n"
    handle = os.open(os.environ["STUB_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)


if __name__ == "__main__":
    sys.exit(main())
