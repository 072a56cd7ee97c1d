"""Tasks of the lab: a model, data and recipes each. `find_task` returns one by name."""

from .find_task import TASKS, find_task
from .task import Batch, Recipe, Task

__all__ = ["TASKS", "Batch", "Recipe", "Task", "find_task"]
