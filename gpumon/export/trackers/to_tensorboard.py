"""TensorBoard: an event file in the folder `gpumon` below the training's own log directory.

Not beside the training's file: of several files in one folder TensorBoard follows only the newest, and would no longer
see what the training adds to its own.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gpumon.analysis.answer import line
from gpumon.analysis.types import Finding
from gpumon.export.run_figures import PREFIX, Figures
from gpumon.export.trackers import about
from gpumon_agent import wire

FOLDER = "gpumon"


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    where = used.where if "://" in used.where else str(Path(folder, used.where))
    return _Run(EventFileWriter(f"{where}/{FOLDER}"))


class _Run:
    def __init__(self, writer: EventFileWriter) -> None:
        self._writer = writer
        self._step = 0
        self._said = ""

    def log(self, figures: Figures) -> None:
        self._step = figures.step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.numbers.items()]
        if figures.answer is not None and figures.answer.state != self._said:
            self._said = figures.answer.state
            values.append(_text(f"{PREFIX}answer", line(figures.answer)))
        values += [_text(f"{PREFIX}findings", about(found)) for found in figures.opened]
        self._write(values)

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        rows = [f"| {name} | {value} |" for name, value in summary.items()]
        table = "\n".join(["| figure | value |", "|---|---|", *rows])
        found = "\n".join(f"- {about(each)}" for each in findings)
        self._write([_text(f"{PREFIX}summary", f"{table}\n\n{found}")])
        self._writer.close()

    def _write(self, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=self._step, summary=Summary(value=values)))
        self._writer.flush()


def _text(tag: str, text: str) -> Summary.Value:
    """As TensorBoard's Text page wants it."""
    plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary.Value(tag=tag, metadata=plugin, tensor=tensor)
