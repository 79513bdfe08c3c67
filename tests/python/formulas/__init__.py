# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Every formula of the library a second time, in numpy, written from docs/formats.md and docs/numerics.md."""
