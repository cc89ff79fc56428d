"""Layers whose results do not depend on how ranks share them: functions of tensors and meshes."""
