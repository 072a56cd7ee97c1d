"""What the lab trains: models, data and recipes, each task a small file. `find` gives one by name."""

from .find import TASKS, find
from .task import Batch, Recipe, Task

__all__ = ["TASKS", "Batch", "Recipe", "Task", "find"]
