"""Both ends of a session, and how a shell drives them.

The shell's loop, the same at both ends (the agent's is shown)::

    session = SenderSession(open_, token_ids, session=os.urandom(16), now=clock())
    reply = await transport.request(open_subject(tenant), session.open_frame(), timeout_s=2.0)
    session.receive(reply, now=clock())
    while not session.is_over:
        while (event := session.next_event()) is not None:
            ...                        # Accept, Delivered, ChunkReady, Token, Done, Failed, ...
        while session.wants_chunk and (chunk := choose()) is not None:
            session.offer(chunk, now=clock())      # or session.recompute(index, now=clock())
        for outgoing in session.frames_to_send(now=clock()):
            await transport.publish(subject_of(outgoing.lane), outgoing.data, lane=outgoing.lane)
        # Wait for a frame (-> session.receive), for session.next_timer() (-> session.handle_timer),
        # or for the transport going down or up (-> session.on_connection).

The worker's: ``parse_open`` on the open subject, then ``ReceiverSession``; on ``ChunkComplete`` decode,
``consumed`` and ``chunk_ready``; on ``Recompute`` prefill and ``chunk_ready``; on ``Asked`` prefill the
question, ``send_token`` each token, ``answered``, ``finish``. A call that needs no answer is followed by
``frames_to_send`` too.

Invariant of both: clock-free, and every input is followed by draining events and frames.
"""

from __future__ import annotations

from wire.receiver import ReceiverSession, parse_open, refusal_frame
from wire.sender import SenderSession

__all__ = ["ReceiverSession", "SenderSession", "parse_open", "refusal_frame"]
