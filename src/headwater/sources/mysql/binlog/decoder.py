"""EventDecoder: event packets to events, one after the other.

It knows what earlier events said: the format of the file, and the tables that row events are of. Everything is checked:
the checksum of every event that has one, every length against the end of its event. What is wrong raises
:class:`~headwater.sources.errors.SourceProtocolError`.

Two things must be told to it: nothing before the first packet, and :meth:`EventDecoder.feed_inner` for the packets of a
compressed transaction::

    decoder = EventDecoder()
    event = decoder.feed(packet)
    if isinstance(event, TransactionPayload):
        for inner in event.packets:
            event = decoder.feed_inner(inner)
"""

from __future__ import annotations

from headwater.sources.mysql.binlog.events import Event


class EventDecoder:
    """Makes events of packets."""

    def feed(self, packet: bytes) -> Event:
        """The event of one packet.

        :raises SourceProtocolError: it is malformed, its checksum is wrong, or it cannot come here.
        """
        raise NotImplementedError

    def feed_inner(self, packet: bytes) -> Event:
        """The event of a packet of a compressed transaction: the same, without a checksum.

        :raises SourceProtocolError: as :meth:`feed`.
        """
        raise NotImplementedError
