"""The journal: sessions of segments, append-only, that lose nothing.

>>> store = FsStore(directory)
>>> branch = start(store, "shop-mirror")
>>> head = store.append(branch.session, branch.segment, Entry("barrier", {"epoch": 42}), expected_head=branch.head)

The format is described in docs/formats/journal.md, the use in docs/journal.md.
"""
