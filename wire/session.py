"""Both ends of a session, and how a shell drives them.

The agent's shell; ``data`` and ``control`` are its two connections, ``clock`` is ``loop.time``::

    id_ = os.urandom(16)
    session = SenderSession(open_, token_ids, session=id_, now=clock(), max_payload=data.max_payload)
    wake = asyncio.Event()

    def take(message):                     # each frame of the worker
        try:
            session.receive(message.data, now=clock())
        except RemoteProtocolError as error:
            failure = error                # log it; damaged or foreign bytes change nothing
        wake.set()

    def changed(change):                   # of either connection
        session.on_connection(is_up=data.is_connected and control.is_connected, now=clock())
        wake.set()

    data.watch(changed)
    control.watch(changed)
    subscription = await control.subscribe(reply_subject(control.inbox, id_), take)
    reply = await control.request(open_subject(tenant), session.open_frame(), timeout_s=2.0)
    session.receive(reply, now=clock())
    while True:
        wake.clear()
        session.handle_timer(now=clock())
        while (event := session.next_event()) is not None:
            ...                            # Accept, Refuse, Delivered, ChunkSent, ChunkReady, ChunkBad,
                                           # Token, Answered, Done, Failed, PeerSilent, PeerLost
        while session.wants_chunk and (choice := choose()) is not None:
            session.offer(choice, now=clock())       # or session.recompute(index, now=clock())
        if all_chosen and not asked:
            session.ask(Ask(max_tokens=64), question_ids, now=clock())
        for outgoing in session.frames_to_send(now=clock()):
            with contextlib.suppress(NotConnected):  # the session finds out what was lost
                if outgoing.lane is Lane.DATA:
                    await data.publish(data_subject(tenant, worker, id_), outgoing.data)
                else:
                    await control.publish(control_subject(tenant, worker, id_), outgoing.data)
        if session.is_over:
            break                          # the last frames, an acknowledgement or a cancel, are out
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(session.next_timer()):
                await wake.wait()

On cancellation: ``session.cancel("client went away", now=clock())``, publish ``frames_to_send`` once
more, unsubscribe.

The worker's shell takes openings from ``control.subscribe(open_subject(tenant), opened, queue=
WORKER_QUEUE)``. For each it calls ``parse_open`` and decides; ``control.publish(message.reply,
refusal_frame(...))`` says no. To say yes it makes a ``ReceiverSession``, *first* subscribes to
``data_subject`` on ``data`` and to ``control_subject`` on ``control`` (both into ``receive``), and then
publishes ``accept_frame()`` on ``message.reply``. Its loop is the same, with every frame published on
``reply_subject(open_.inbox, id_)``, until ``is_closed``:

- ``ChunkComplete``: decode, ``consumed`` (gives credit back), ``chunk_ready``; or ``reject``.
- ``Recompute``: prefill from the token ids, ``chunk_ready``.
- ``Abort``: drop that epoch if it has not begun; a whole bitstream is ``consumed`` all the same.
- ``Asked``: when the context is complete, prefill, ``send_token`` for each token, ``answered``,
  and ``finish`` (with the evaluation, if one was asked for).
- ``Cancel``, ``PeerLost``: free everything. ``PeerSilent`` frees nothing: the agent may come back.

Calls that come from other threads' results are followed by ``frames_to_send`` too, so set ``wake``.

Invariant of both: clock-free, and every input is followed by draining events and frames.
"""

from __future__ import annotations

from wire.receiver import ReceiverSession, parse_open, refusal_frame
from wire.sender import SenderSession

__all__ = ["ReceiverSession", "SenderSession", "parse_open", "refusal_frame"]
