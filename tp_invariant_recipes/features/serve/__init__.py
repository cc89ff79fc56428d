# SPDX-License-Identifier: Apache-2.0
"""`tpi serve`: rollouts and scores over HTTP, with the routes of SGLang and OpenAI."""
