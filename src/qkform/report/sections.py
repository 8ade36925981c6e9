"""What the page shows of each entry, model or series, ready for its template: words, numbers, charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from qkform.records import ModelScores, Row
from qkform.report import charts, paths, words
from qkform.report.look import Axis, model_colour
from qkform.report.reading import movement, reading
from qkform.report.rows import Group, Points, groups, text, whole_score
from qkform.report.series import UNITS, Entry

Packed = Callable[..., dict[str, Any]]  # a chart and the name of its rows -> what the template's macro shows
KINDS = {"self": "self-attention", "cross": "cross-attention"}


class Section:
    """One entry on the page. Summaries are those of its `start` model, and of whole scores alone."""

    def __init__(self, index: int, label: str, entry: Entry, packed: Packed) -> None:
        self.index, self.label, self.entry, self._packed = index, label, entry, packed
        self.colour = model_colour(index)
        shown = entry.models[entry.start]
        self.source = text(entry.name)
        self.formats = list(dict.fromkeys(text(model.format) for model in entry.models))
        self.model_type = text(shown.model_type) if shown.model_type else None
        self.skipped = _skipped(entry.models)
        self.all_groups = groups(entry.models, label, distances=entry.kind == "offset")
        whole = whole_score(self.all_groups)
        self.rows = Points(row for group in whole for row in group.rows)
        self.start_groups = [group.at(entry.start) for group in whole] if entry.kind else whole
        self.start_groups = [group for group in self.start_groups if group.rows]
        self.layers = [row for group in self.start_groups for row in group.layers]
        self.heads = [row for group in self.start_groups for row in group.heads]
        # the sentences are made from the rows made safe: a record may hold anything
        self.reading = reading(replace(shown, rows=[*self.layers, *self.heads]))
        if entry.kind:
            safe = [
                replace(m, rows=[r for r in self.rows if r["stop"] == i]) for i, m in enumerate(entry.models)
            ]
            at = f"At {self.unit} {entry.values[entry.start]:,}: "
            self.reading = f"{movement(self.unit, entry.values, safe)} {at}{self.reading}"

    @property
    def unit(self) -> str:
        """ "step" or "distance"; empty for a single model."""
        return UNITS[self.entry.kind] if self.entry.kind else ""

    @property
    def stops(self) -> list[str]:
        """What the slider says at each place: "1,000", and "1,000 (2)" for a second model there."""
        seen: dict[int, int] = {}
        out = []
        for value in self.entry.values:
            seen[value] = seen.get(value, 0) + 1
            again = f" ({seen[value]})" if seen[value] > 1 else ""
            out.append(f"{value:,}".replace("-", "\u2212") + again)
        return out

    @property
    def facts(self) -> list[tuple[str, str]]:
        masks = sorted({mask for group in self.all_groups for mask in group.masks})
        found = [
            ("model type", self.model_type or "not given"),
            ("format", ", ".join(self.formats[:3])),
            ("form", text(self.entry.models[0].form)),
            ("size", words.shape(self.start_groups) if self.start_groups else "nothing scored"),
            ("mask", ", ".join(masks) or "unknown"),
        ]
        if self.entry.kind:
            found.insert(0, (f"{self.unit}s", f"{len(self.stops)}, from {self.stops[0]} to {self.stops[-1]}"))
        parts = list(dict.fromkeys(group.part for group in self.all_groups if group.part))
        if parts:
            found.append(("parts of the score", ", ".join(parts)))
        revision = self.entry.models[0].revision
        if revision and not self.entry.kind:
            found.append(("revision", text(revision)[:12]))
        means = words.null_means(self.layers or self.heads)
        return [*found, ("1/d, random mean", means)] if means else found

    @property
    def spreads(self) -> list[words.Spread]:
        found = [
            words.spread("layer symmetry", self.layers, "symmetry"),
            words.spread("head symmetry", self.heads, "symmetry"),
            words.spread("layer directionality", self.layers, "directionality"),
        ]
        return [one for one in found if one is not None]

    @property
    def ways(self) -> dict[str, Any] | None:
        """The plane of a series, with the way of every layer; None for a single model or without both scores."""
        kind = self.entry.kind
        layers = Points(row for row in self.rows if row["head"] is None)
        if kind is None or not both_scores(layers):
            return None
        now = self.entry.values[self.entry.start]
        chart = paths.plane_paths(
            layers, kind, now=now, now_stop=self.entry.start, width="container", held_as="path"
        )
        return self._packed(chart, f"entry-{self.index}")

    @property
    def parts(self) -> Iterator[dict[str, Any]]:
        """One per component, kind of attention and part of the score: its heading, charts, gaps and flags."""
        for number, group in enumerate(self.all_groups):
            name = f"g{self.index}-{number}"
            energy = charts.signature(group.rows, colour=self.colour, width="container", held_as="rows")
            start = group.at(self.entry.start) if self.entry.kind else group
            yield {
                "component": group.component,
                "part": group.part,
                "kind": KINDS.get(group.attention, group.attention) or "attention",
                "mask": ", ".join(group.masks) or "unknown",
                "shape": words.shape([start if start.rows else group]),
                "symmetry": self._axis(group, "symmetry", name),
                "directionality": self._axis(group, "directionality", name),
                "signature": self._packed(energy, name) if group.has("positive_energy") else None,
                "undefined": words.undefined(group),
                "flags": words.flagged(group),
            }

    def _axis(self, group: Group, axis: Axis, name: str) -> dict[str, Any]:
        """The charts of one score; None in place of a chart that would have nothing to show."""
        found = [abs(row[axis]) for row in group.heads if row[axis] is not None]
        limit = charts.heatmap_limit(group.rows, axis)
        heat = charts.heatmap(group.rows, axis, width="container", held_as="rows") if found else None
        curve = (
            charts.profile(group.rows, axis, colour=self.colour, width="container", held_as="rows")
            if group.has(axis)
            else None
        )
        way = None
        kind = self.entry.kind
        if kind and any(row[axis] is not None for row in group.layers):
            now = self.entry.values[self.entry.start]
            way = paths.path(group.rows, axis, kind, now=now, width="container", held_as="path")
        return {
            "limit": f"{limit:g}",
            "beyond": sum(value > limit for value in found),
            "path": way and self._packed(way, name),
            "heatmap": heat and self._packed(heat, name),
            "profile": curve and self._packed(curve, name),
        }


def both_scores(rows: Sequence[Row]) -> bool:
    """Whether any row has a place in the plane."""
    return any(row["symmetry"] is not None and row["directionality"] is not None for row in rows)


def _skipped(models: Sequence[ModelScores]) -> list[dict[str, str]]:
    """What was seen and not scored, once for all models of a series."""
    found = {(text(s.get("module", "")), text(s.get("reason", ""))): None for m in models for s in m.skipped}
    return [{"module": module, "reason": reason} for module, reason in found]
