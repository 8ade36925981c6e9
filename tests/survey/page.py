"""What the survey found, as the record that tests read and as a section of docs/families.md."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.survey.verify import NO_SOFTMAX, NOT_YET, SCANNED, VERIFIED

RECORD = Path(__file__).parent / "results.json"
REASON = 160  # characters of a reason on the page

INTRODUCTION = """
## Every model type of transformers

One command walks every model type of the installed transformers ({transformers}):

```
python -m tests.survey --write docs/families.md
```

**{verified} of {total} model types are verified**, {attentions} attentions in all. {scanned} are read and cannot be
held against the model, {none} have no softmax attention, {notyet} are not there yet.

The default config of a type is made small, sub-configs too. The model runs its own forward pass, and where a
part of it (a vision tower, say) is not reached by that, the part runs its own. Every torch function is watched:
a product of two activations whose result reaches a softmax is an attention, whatever its module is called. The
outputs of the projections before it are then replaced by numbers that tell them apart, and what arrives in the
product says which output of which projection stands where: so the rows of each head, the order they are stored
in, and the key head of each query head. From these the form is worked out and compared with what qkform reads
from the saved file: forms, biases, counts, pairing, mask, norm; and every mistake of the list above that applies
must be noticed. A type is verified when every softmax attention that was seen is found by qkform and agrees, or
is listed by qkform as not scored, and every attention that qkform lists was seen.

*Attentions*: how many, and where; *terms*: what the score adds that is not in the form (positions).

| model type | attentions | Q, K | stored | keys | mask | norm | terms |
|---|---|---|---|---|---|---|---|
"""


def recorded(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the page and the tests need of the results, in the order of the names; what is recorded stays as it is."""
    out = {}
    for name, r in sorted(results.items()):
        if r["status"] == VERIFIED and "matched" not in r:
            out[name] = dict(r)
            continue
        entry: dict[str, Any] = {"status": r["status"]}
        if r["status"] == VERIFIED:
            entry["attentions"] = r["matched"]
            entry["rows"] = _rows(r["components"])
        else:
            entry["step"], entry["reason"] = r["step"], _plain(r["reason"])
        out[name] = entry
    return out


def _plain(reason: str) -> str:
    """A reason without what differs from machine to machine."""
    reason = re.sub(r"0x[0-9a-f]{6,}", "0x...", reason)
    reason = re.sub(r"/[\w./-]*/(?=[\w.-]+)", "", reason)
    return " ".join(reason.split())[:REASON]


def _rows(components: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Attentions of one kind are one row: [module, count, names, stored, keys, mask, norm, terms]."""
    kinds: collections.Counter[tuple[str, ...]] = collections.Counter()
    for c in components:
        module = _numbered(c["module"])
        q, k = (_local(c[side], c["module"]) for side in ("q", "k"))
        order = c["part"].rpartition(": ")[0]
        names = q if q == k else f"{q}, {k}"
        stored = ("columns" if c["transposed"] else "rows") + (f", {order}" if order else "")
        keys = "one per head" if c["kv_heads"] == c["heads"] else "grouped"
        mask = c["mask"] if c["attention"] == "self" else "cross"
        extra = [*(["query-key norm"] if "qk_norm" in c["flags"] else [])]
        extra += [f"{c['terms']} more"] if c["terms"] else []
        extra += ["learned vector"] if c["offset"] else []
        extra += [f"part {c['score_part']}"] if c.get("score_part") else []
        kinds[module, names, stored, keys, mask, c["norm_kind"], ", ".join(extra)] += 1
    return [[kind[0], str(n), *kind[1:]] for kind, n in kinds.items()]


def _numbered(module: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "{n}", module)


def _local(tensor: str, module: str) -> str:
    return tensor.removeprefix(module + ".").removesuffix(".weight")


def section(record: Mapping[str, Mapping[str, Any]]) -> str:
    """The part of the page that the survey writes."""
    import transformers

    counts = collections.Counter(r["status"] for r in record.values())
    head = INTRODUCTION.format(
        transformers=transformers.__version__,
        verified=counts[VERIFIED],
        total=len(record),
        attentions=sum(r.get("attentions", 0) for r in record.values()),
        scanned=counts[SCANNED],
        none=counts[NO_SOFTMAX],
        notyet=counts[NOT_YET],
    )
    lines = [
        line for name, r in record.items() if r["status"] == VERIFIED for line in _lines(name, r["rows"])
    ]
    text = head + "\n".join(lines) + "\n"
    for title, status in (
        ("Scanned, and not verifiable", SCANNED),
        ("No softmax attention", NO_SOFTMAX),
        ("Not yet", NOT_YET),
    ):
        text += f"\n### {title}\n\n" + "\n".join(_list(record, status)) + "\n"
    return text


def _lines(name: str, rows: Iterable[Sequence[str]]) -> list[str]:
    out = []
    for i, (module, count, names, stored, keys, mask, norm, extra) in enumerate(rows):
        shown = [
            name if i == 0 else "",
            f"{count}: `{module or '(the model)'}`",
            f"`{names}`",
            stored,
            keys,
            mask,
        ]
        cells = [*shown, norm, extra]
        out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return out


def _list(record: Mapping[str, Mapping[str, Any]], status: str) -> list[str]:
    """Reasons, each with its model types."""
    reasons: dict[str, list[str]] = {}
    for name, r in record.items():
        if r["status"] == status:
            step = f"{r['step']}: " if r["step"] else ""
            reasons.setdefault(step + re.sub(r"[`<>|*]", " ", r["reason"]), []).append(name)
    ordered = sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"- {', '.join(f'`{n}`' for n in names)}: {reason}" for reason, names in ordered] or ["None."]


def write(record: Mapping[str, Any]) -> None:
    RECORD.write_text(json.dumps(record, indent=0, sort_keys=True) + "\n", encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found
