"""A config.json with the names that Hugging Face gives one thing in different families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumon.analysis.estimate.model import NotAModel


@dataclass(frozen=True, slots=True)
class Config:
    """What was read, and from where."""

    content: Mapping[str, Any]
    where: str = "config.json"

    @property
    def model_type(self) -> str:
        """ "tabformer" is a BERT whose config has fields: IBM's code gives it no type of its own."""
        kind = str(self.content.get("model_type", ""))
        return "tabformer" if kind == "bert" and "ncols" in self.content and not self.get("flatten") else kind

    @property
    def architecture(self) -> str:
        """The class that was saved ("BertForMaskedLM"); empty where the file does not say."""
        named = self.content.get("architectures") or [""]
        return str(named[0]) if isinstance(named, list) else ""

    @property
    def name(self) -> str:
        return self.architecture or self.model_type

    def having(self, **changes: Any) -> Config:
        """The same with some values changed."""
        return Config({**self.content, **changes}, self.where)

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is there and not null."""
        for name in names:
            value = self.content.get(name)
            if value is not None:
                return value
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0. Raises NotAModel for anything else, KeyError where it is missing."""
        value = self.get(*names, default=default)
        if value is None:
            raise KeyError(names[0])
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise NotAModel(f"{self.where}: {names[0]} is {value!r}, and should be a whole number above 0")
        return value

    def share(self, *names: str, default: float = 0.0) -> float:
        """A probability or a fraction."""
        value = self.get(*names, default=default)
        if not isinstance(value, (int, float)):
            raise NotAModel(f"{self.where}: {names[0]} is {value!r}, and should be a number")
        return float(value)

    @property
    def labels(self) -> int:
        named = self.content.get("id2label")
        return len(named) if isinstance(named, (dict, list)) and named else self.size("num_labels", default=2)

    def is_for(self, *tasks: str) -> bool:
        """Whether the class is for one of the tasks ("SequenceClassification")."""
        return any(task in self.architecture for task in tasks)
