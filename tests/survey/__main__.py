"""python -m tests.survey [REGEX] [--write docs/families.md] [--jobs 2] [--json FILE] [--update FILE]"""

from __future__ import annotations

import argparse
import collections
import json
import re
import time
from pathlib import Path

from tests import truth
from tests.survey import page, walk


def main() -> None:
    parser = argparse.ArgumentParser(description="Verify every model type of the installed transformers.")
    parser.add_argument(
        "only", nargs="?", default="", help="a regular expression for the names of model types"
    )
    parser.add_argument(
        "--write", type=Path, help="write the page to this file, and the record that tests read"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write everything that was found to this file")
    parser.add_argument(
        "--update", type=Path, help="read this file first, and replace in it what was asked for"
    )
    parser.add_argument(
        "--again", action="store_true", help="only what --update FILE does not have as verified"
    )
    asked = parser.parse_args()
    if asked.only and asked.write and not asked.update:
        parser.error(
            "the page needs every model type: leave out the regular expression, or pass --update FILE"
        )
    names = [n for n in walk.model_types() if re.fullmatch(asked.only or ".*", n)]
    found = json.loads(asked.update.read_text()) if asked.update and asked.update.exists() else {}
    if asked.again:
        done = {"verified", "no softmax attention"}
        names = [n for n in names if found.get(n, {}).get("status") not in done]
    started = time.monotonic()
    for i, result in enumerate(walk.results(names, asked.jobs), 1):
        found[result["model_type"]] = result
        seconds = time.monotonic() - started
        line = f"{i}/{len(names)} {seconds:5.0f} s  {result['model_type']:32} {result['status']:24}"
        print(f"{line} {result['step']:8} {result['reason'][:100]}", flush=True)
        if asked.json and (i % 20 == 0 or i == len(names)):
            asked.json.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    counts = collections.Counter(r["status"] for r in found.values())
    print(", ".join(f"{n} {status}" for status, n in counts.most_common()))
    if asked.write:
        record = page.recorded(found)
        page.write(record)
        asked.write.write_text(truth.page(truth.verdicts()) + page.section(record), encoding="utf-8")


if __name__ == "__main__":
    main()
