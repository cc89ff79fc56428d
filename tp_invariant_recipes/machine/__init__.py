# SPDX-License-Identifier: Apache-2.0
"""This machine: GPUs, memory, network, the terminal, installed versions."""
