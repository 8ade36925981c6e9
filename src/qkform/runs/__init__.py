"""The record of a training run, `record.jsonl`: what a tracker writes while a model trains, and everyone reads.

`RunRecord.load(path)` reads one, also while the run goes on or after it was killed; `RunWriter` appends to one.
"""

from qkform.runs.fields import CONFLICT, MEASURES, NAME, SCHEMA
from qkform.runs.finding import records_at
from qkform.runs.lines import last_step
from qkform.runs.record import RunRecord
from qkform.runs.writer import RunWriter

__all__ = ["CONFLICT", "MEASURES", "NAME", "SCHEMA", "RunRecord", "RunWriter", "last_step", "records_at"]
