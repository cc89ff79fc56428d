# SPDX-License-Identifier: Apache-2.0
"""The start of a process: Bridge's first import, bytecode, lazy imports, forking, the clock of starts."""
