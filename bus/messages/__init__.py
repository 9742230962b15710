"""The messages of the bus, as frozen structs.

A frame on the wire is one MessagePack map, the :class:`Envelope`. Its ``body`` is the map of one
message. Field names carry units. Tensors are not sent as messages; see :mod:`bus.weight_transfer`.
:mod:`bus.messages.registry` lists all messages; :mod:`bus.messages.codec` encodes and decodes them.
"""

from bus.messages.canary import *
from bus.messages.envelope import *
from bus.messages.membership import *
from bus.messages.pause import *
from bus.messages.registry import *
from bus.messages.replies import *
from bus.messages.status import *
from bus.messages.types import *
from bus.messages.update import *
from bus.messages.waves import *
