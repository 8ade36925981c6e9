"""What the page shows of a `DiffTable`, ready for its template: words, numbers, charts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from qkform.differences import DiffTable
from qkform.records import Row, values
from qkform.report import changes, words
from qkform.report.reading import change
from qkform.report.rows import Group, diff_groups, distinct, text, whole_score
from qkform.report.sections import Packed


class DiffSection:
    """A comparison on the page: summaries of whole scores, then charts per list of layers."""

    def __init__(self, diff: DiffTable, packed: Packed) -> None:
        self._packed = packed
        self.groups = diff_groups(diff)
        self.a, self.b = distinct([diff.source_a, diff.source_b])
        self.source_a, self.source_b = text(diff.source_a), text(diff.source_b)
        self.model_type = text(diff.model_type) if diff.model_type else "not given"
        self.only_in_a, self.only_in_b = (
            [text(m) for m in only] for only in (diff.only_in_a, diff.only_in_b)
        )
        whole = whole_score(self.groups)
        self.layers = [row for group in whole for row in group.layers]
        self.heads = [row for group in whole for row in group.heads]
        # the sentences are made from the rows made safe: a record may hold anything
        self.reading = change(replace(diff, rows=[*self.layers, *self.heads]))
        self.size = words.shape(whole) if whole else "nothing compared"

    @property
    def totals(self) -> str:
        return " · ".join(
            [
                words.counted(len(self.layers), "layer"),
                words.counted(len(self.heads), "head"),
                self.model_type,
            ]
        )

    @property
    def headings(self) -> list[dict[str, str]]:
        """Of the first parts, for the links at the top."""
        return [{"component": group.component, "part": group.part} for group in self.groups[:8]]

    @property
    def largest(self) -> list[Row]:
        """The heads whose symmetry changed most."""
        known = [row for row in self.heads if row["symmetry_change"] is not None]
        return sorted(known, key=lambda row: -abs(row["symmetry_change"]))[:8]

    @property
    def spreads(self) -> list[words.Spread]:
        found = [
            words.spread("layer symmetry in a", self.layers, "symmetry_a"),
            words.spread("layer symmetry in b", self.layers, "symmetry_b"),
            words.spread("change of a layer's symmetry", self.layers, "symmetry_change"),
            words.spread("layer directionality in a", self.layers, "directionality_a"),
            words.spread("layer directionality in b", self.layers, "directionality_b"),
        ]
        return [one for one in found if one is not None]

    @property
    def parts(self) -> Iterator[dict[str, Any]]:
        """One per component, kind of attention and part of the score: its heading, charts, gaps and flags."""
        for number, group in enumerate(self.groups):
            name = f"d{number}"
            kind = {"self": "self-attention", "cross": "cross-attention"}.get(
                group.attention, group.attention
            )
            yield {
                "component": group.component,
                "part": group.part,
                "kind": kind or "attention",
                "shape": words.shape([group]),
                "symmetry": self._change(group, "symmetry_change", name),
                "relative": self._change(group, "relative_change", name),
                "arrows": self._arrows(group, name),
                "undefined": words.undefined(group, ("symmetry_change", "relative_change")),
                "flags": words.flagged(group),
            }

    def _change(self, group: Group, column: changes.Change, name: str) -> dict[str, Any]:
        """Heat map and profile of one change; None in place of a chart that would have nothing to show."""
        limit = changes.heatmap_limit(group.rows, column)
        heads = values(group.heads, column)
        heat = changes.heatmap(group.rows, column, width="container", held_as="rows") if heads else None
        curve = (
            changes.profile(group.rows, column, width="container", held_as="rows")
            if group.has(column)
            else None
        )
        return {
            "limit": f"{limit:g}",
            "beyond": sum(abs(value) > limit for value in heads),
            "heatmap": heat and self._packed(heat, name),
            "profile": curve and self._packed(curve, name),
        }

    def _arrows(self, group: Group, name: str) -> dict[str, Any] | None:
        if not changes.both_ends(group.rows):
            return None
        return self._packed(changes.arrows(group.rows, width="container", held_as="rows"), name)
