# SPDX-License-Identifier: Apache-2.0
"""One run on the nodes of an allocation: srun, rendezvous, heartbeat, and each node's agent."""
