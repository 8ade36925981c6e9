"""One layer of attention, solved: the end of training as a function of the rates at which its two circuits learn.

`Flow` is the model and its closed forms; docs/theory.md tells the story. Needs the extra `theory` (scipy).
"""

from qkform.dynamics.one_layer.flow import Flow
from qkform.dynamics.one_layer.points import Course, EndPoint, Simulation
from qkform.dynamics.one_layer.task import Task

__all__ = ["Course", "EndPoint", "Flow", "Simulation", "Task"]
