"""The messages an agent and its viewers exchange: typed Structs, one codec, no sockets and no torch.

A frame is a topic (`LIVE`; or `SNAPSHOT` or `GLANCE` and the viewer's nonce) followed by one msgpack `Packet`. A
packet carries events. Events that belong to the stream of the run (`Phase`, `Step`, `Ledger`, ...) are numbered by the
agent's recorder; a gap in the numbers means events were dropped. Events that describe (`Hello`, `Model`, `Module`,
`Layers`, `Census`, `Progress`, `Heartbeat`, ...) have no number: the newest replaces the older.

Within a major version each side can read what the other writes, whichever is newer: fields are only added, last and
with a default, and an event of an unknown kind is `Unread`.

Bytes are ints. An unknown value is None, never 0. Clocks: `*_ns` are the agent's monotonic clock unless the name says
`unix`; `Hello.clock` relates the two.
"""

from __future__ import annotations

from .base import CODE_CHARS_MAX as CODE_CHARS_MAX
from .base import LOCAL_RANKS_MAX as LOCAL_RANKS_MAX
from .base import NAME_CHARS_MAX as NAME_CHARS_MAX
from .base import RANKS_MAX as RANKS_MAX
from .base import TEXT_CHARS_MAX as TEXT_CHARS_MAX
from .base import Bytes as Bytes
from .base import Few as Few
from .base import Shape as Shape
from .base import Text as Text
from .base import clean as clean
from .base import clean_argv as clean_argv
from .codec import EVENT_BYTES_MAX as EVENT_BYTES_MAX
from .codec import FRAME_BYTES_MAX as FRAME_BYTES_MAX
from .codec import GLANCE as GLANCE
from .codec import LIVE as LIVE
from .codec import NONCE_BYTES as NONCE_BYTES
from .codec import PROTOCOL_MAJOR as PROTOCOL_MAJOR
from .codec import PROTOCOL_MINOR as PROTOCOL_MINOR
from .codec import SNAPSHOT as SNAPSHOT
from .codec import Event as Event
from .codec import NumberedEvent as NumberedEvent
from .codec import Packet as Packet
from .codec import ProtocolMismatch as ProtocolMismatch
from .codec import Received as Received
from .codec import Unread as Unread
from .codec import WireError as WireError
from .codec import check_protocol as check_protocol
from .codec import decode_event as decode_event
from .codec import decode_frame as decode_frame
from .codec import decode_received as decode_received
from .codec import decode_reply as decode_reply
from .codec import decode_request as decode_request
from .codec import encode_asked as encode_asked
from .codec import encode_event as encode_event
from .codec import encode_received as encode_received
from .codec import encode_recorded as encode_recorded
from .codec import frame as frame
from .codec import is_request as is_request
from .codec import kind as kind
from .codec import kind_of_sound as kind_of_sound
from .codec import mismatch_sentence as mismatch_sentence
from .codec import pack as pack
from .codec import past_step as past_step
from .codec import peak_of as peak_of
from .codec import step_of as step_of
from .codec import unpack as unpack
from .evidence import ALLOCATED as ALLOCATED
from .evidence import BLOCK_HOLDERS_MAX as BLOCK_HOLDERS_MAX
from .evidence import BLOCK_OWNERS as BLOCK_OWNERS
from .evidence import BLOCKS as BLOCKS
from .evidence import BLOCKS_PER_PART as BLOCKS_PER_PART
from .evidence import CENSUS as CENSUS
from .evidence import CENSUSES_KEPT as CENSUSES_KEPT
from .evidence import CYCLE as CYCLE
from .evidence import GROUPS_MAX as GROUPS_MAX
from .evidence import HOLDER_OWNERS as HOLDER_OWNERS
from .evidence import HOLDERS_MAX as HOLDERS_MAX
from .evidence import INACTIVE as INACTIVE
from .evidence import NOT_DONE as NOT_DONE
from .evidence import PENDING as PENDING
from .evidence import ROOM as ROOM
from .evidence import SEGMENTS_PER_PART as SEGMENTS_PER_PART
from .evidence import SNAPSHOT_FILE as SNAPSHOT_FILE
from .evidence import Census as Census
from .evidence import Checkpoint as Checkpoint
from .evidence import Group as Group
from .evidence import Holder as Holder
from .evidence import Reply as Reply
from .evidence import Request as Request
from .evidence import Segment as Segment
from .evidence import Segments as Segments
from .evidence import Snapshot as Snapshot
from .evidence import Unclaimed as Unclaimed
from .evidence import parts as parts
from .host import ChildProcess as ChildProcess
from .host import DeviceProcess as DeviceProcess
from .host import DeviceReading as DeviceReading
from .host import Host as Host
from .host import Link as Link
from .host import ProcessReading as ProcessReading
from .speaking import TRACKERS_MAX as TRACKERS_MAX
from .speaking import Clock as Clock
from .speaking import Device as Device
from .speaking import Heartbeat as Heartbeat
from .speaking import Hello as Hello
from .speaking import PartOff as PartOff
from .speaking import Synced as Synced
from .speaking import Tracker as Tracker
from .speaking import Trackers as Trackers
from .speaking import device_label as device_label
from .stream import ABORTED as ABORTED
from .stream import BACKWARD as BACKWARD
from .stream import BETWEEN as BETWEEN
from .stream import BOUND as BOUND
from .stream import EVAL as EVAL
from .stream import FITS as FITS
from .stream import FORWARD as FORWARD
from .stream import GRAPH_REPLAY as GRAPH_REPLAY
from .stream import INFERRED as INFERRED
from .stream import LASTING as LASTING
from .stream import LEDGERS_PER_PAST_STEP as LEDGERS_PER_PAST_STEP
from .stream import LOAD as LOAD
from .stream import MERGED as MERGED
from .stream import OOM_AHEAD as OOM_AHEAD
from .stream import OPTIMIZER as OPTIMIZER
from .stream import OVERLAPPED as OVERLAPPED
from .stream import PHASES_PER_STEP_MAX as PHASES_PER_STEP_MAX
from .stream import RECOMPUTED as RECOMPUTED
from .stream import RECORDED as RECORDED
from .stream import SAMPLED as SAMPLED
from .stream import SHAPES_MAX as SHAPES_MAX
from .stream import SKIPPED as SKIPPED
from .stream import TIGHT as TIGHT
from .stream import TRAINS as TRAINS
from .stream import Goodbye as Goodbye
from .stream import Ledger as Ledger
from .stream import Notice as Notice
from .stream import Oom as Oom
from .stream import Outlook as Outlook
from .stream import PastStep as PastStep
from .stream import Phase as Phase
from .stream import Progress as Progress
from .stream import QuietEnd as QuietEnd
from .stream import QuietPeak as QuietPeak
from .stream import Step as Step
from .stream import Thinned as Thinned
from .stream import quiet_peak as quiet_peak
from .stream import tallest as tallest
from .trained import LAYERS_PER_PART as LAYERS_PER_PART
from .trained import Layer as Layer
from .trained import Layers as Layers
from .trained import Model as Model
from .trained import Module as Module
from .trained import Optimizer as Optimizer
from .trained import Parallel as Parallel
from .trained import Sized as Sized
from .trained import layers as layers
