"""Speaks: messages as bytes, frames, the shared-memory page. Versioned, strict, never pickle."""
