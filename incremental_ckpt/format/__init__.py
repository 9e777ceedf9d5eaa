"""The repository format of docs/format.md: bytes <-> facts, without I/O and without torch.

It must not know stores, ranks or models; import from its modules, each of which covers a section of the format.
"""
