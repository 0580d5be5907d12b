"""The rollout store: HDF5 files that are never changed once they have their name.

    rollouts/segment_000000.h5                  closed: compressed, checksummed
    rollouts/segment_000001.open/part_000000.h5 open: one small file for each flush

HDF5 cannot append safely: a process killed in the middle of an append leaves a file that may not
open, and a reader beside it may see torn metadata. So nothing is appended. Each flush becomes one
small file of the same format, and from time to time the parts of the open segment are joined into
a closed one, which replaces them. Every file is built in memory, written with plain I/O beside its
place, synced and renamed; therefore
  - a kill at any instant loses at most what was not flushed, and every file opens;
  - readers need no lock and see only whole files, while the run goes on, on any file system;
  - a full disk is an ordinary error, met before anything has changed, and can be waited out.

`layout` is the format as data, `blocks` columns in memory, `encode` and `file` one HDF5 file, made
and read (the only doors to h5py), `writer` and `reader` a run's folder. Under the writer, `segment`
says what its files are and `disk` puts them there.
"""

from llamarl_hpc.storage.rollout_store.reader import RolloutReader
from llamarl_hpc.storage.rollout_store.writer import RolloutWriter

__all__ = ["RolloutReader", "RolloutWriter"]
