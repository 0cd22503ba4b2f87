"""Which of torch's operations a piece of code runs."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts, while it is on or inside functions ``within`` which it is, the operations that ``is_counted``.

    It is given an operation and its arguments and result, nested as they are.
    """

    def __init__(self, is_counted: Callable[[Any, Any], bool], on: bool = False) -> None:
        super().__init__()
        self.is_counted, self.on, self.calls = is_counted, on, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.on and self.is_counted(func, (args, kwargs, result)):
            self.calls[func.name()] += 1
        return result

    def within(self, function: Callable[..., Any], on: bool = True) -> Callable[..., Any]:
        """``function``, in which it is on or off."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with patch.object(self, "on", on):
                return function(*args, **kwargs)

        return call
