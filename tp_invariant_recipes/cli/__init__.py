# SPDX-License-Identifier: Apache-2.0
"""The command line: each command parses, calls one function of the package, prints, and sets the exit status."""
