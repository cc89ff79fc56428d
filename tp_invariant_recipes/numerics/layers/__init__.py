# SPDX-License-Identifier: Apache-2.0
"""Layers whose results do not depend on how ranks share them: functions of tensors and meshes."""
