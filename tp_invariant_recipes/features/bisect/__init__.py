# SPDX-License-Identifier: Apache-2.0
"""tpi bisect: the step, the module and the tensor where two runs begin to differ."""
