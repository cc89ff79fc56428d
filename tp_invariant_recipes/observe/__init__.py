# SPDX-License-Identifier: Apache-2.0
"""What callbacks read of a training: tensors and their parts, digests, dumps, traces, the ledger's recorder."""
