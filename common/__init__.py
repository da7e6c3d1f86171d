"""What the three papers share: state, mesh, checkpoints, loop, metrics. It never knows a paper."""
