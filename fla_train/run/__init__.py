"""A run from the command to its processes, and what it leaves behind.

`resolve` turns a request into a plan, `launch` starts the machine's `agent`, the agent starts a `worker` for
each `rank`, and the rank trains (`fla_train.training`). `results` reads run folders.
"""
