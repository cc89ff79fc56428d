# SPDX-License-Identifier: Apache-2.0
"""guard=…: notice silent data corruption while a run trains, and name the rank."""
