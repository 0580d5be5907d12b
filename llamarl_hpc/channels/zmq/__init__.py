"""The channel over ZeroMQ: one ROUTER at the controller, one DEALER per executor. The only door
to zmq.

    wire:       [identity]  count (8 bytes)  header (msgpack)  array 0  array 1 ...
    count:      messages sent so far on this side, this one included; heartbeats are not counted
    identity:   "generator.1#3"  executor and instance; the router strips and adds it

Who may talk: every start of a controller makes new CURVE key pairs. The client pair and the
server's public key go into the address file (0600); without them a peer gets no further than the
handshake. Who is heard: only the instances that the controller expects (see channels/base.py).

Nothing is lost silently: queues have no bound (credit bounds what is in flight), a closed channel
flushes for LINGER_S, a message that cannot be delivered is an error at the sender, and what a
broken connection swallows shows as a gap in the counts at the next message or heartbeat. Who
waits for whom: the controller's loop for any executor (`receive`), an executor's main thread for
the controller (`receive`, with a limit). The executor's own background thread waits for neither,
so heartbeats go out while the main thread computes.

`controller` and `executor` are the two ends, `wire` is what both must agree on.
"""

from llamarl_hpc.channels.zmq.controller import ControllerChannel
from llamarl_hpc.channels.zmq.executor import ExecutorChannel

__all__ = ["ControllerChannel", "ExecutorChannel"]
