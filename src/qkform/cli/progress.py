"""Progress of a training on stderr: a line that is written over where a person watches, plain lines otherwise."""

from __future__ import annotations

import math
import shutil
import sys
import time
from typing import TYPE_CHECKING

from qkform.cli.output import say, say_lines

if TYPE_CHECKING:
    from qkform.training.watch import Progress


class Line:
    """What `qkform.training.run` takes as `say` and `progress`. `every`: steps between plain lines."""

    def __init__(self, every: int) -> None:
        self.every, self.last = every, 0.0
        self.live = sys.stderr.isatty()
        self.open = False

    def say(self, text: str) -> None:
        self.end()
        say(text)

    def say_warnings(self, text: str) -> None:
        if text.startswith(("warning", "not exact")):
            self.say(text)

    def show(self, p: Progress) -> None:
        now = time.monotonic()
        due = p.step % self.every == 0 or p.step == p.steps
        if not due and not (self.live and now - self.last > 0.2):
            return
        self.last = now
        loss = f"  loss {p.loss:.3f}" if not math.isnan(p.loss) else ""
        held_out = f"  held-out {p.held_out:.3f}" if p.held_out is not None else ""
        rate = (
            f"  {p.tokens_per_second:,.0f} tokens/s  {_clock(p.seconds_left)} left"
            if p.tokens_per_second
            else ""
        )
        text = f"step {p.step}/{p.steps}{loss}{held_out}{rate}"
        if not self.live:
            say(text)
            return
        width = shutil.get_terminal_size().columns - 1
        try:
            sys.stderr.write(f"\r{text[:width]:<{width}}")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more
            return
        self.open = True

    def end(self) -> None:
        if self.open:
            say_lines("")
            self.open = False


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
