"""Text data, from documents to the batches of a training step. See docs/data_reference.md.

1. `sources` opens a corpus: local files, a dataset on the Hub, or Python's standard library. It cuts the
   corpus into slices (`files`), consecutive documents that one process can read: row groups of a parquet
   file, a range of bytes of a JSON-lines file, some documents of a stream.
2. `tokenize` turns each slice into one shard, in several processes. `tokenizers` loads or trains the
   tokenizer. The hash of a document's text decides whether it is in the training or the validation split.
3. `shards` writes and reads the shard files, with checksums, and the manifest that lists them.
4. `prepare` carries out steps 1 to 3 in a folder of the `cache`. It resumes, and reuses prepared folders.
5. `dataset` cuts the token stream of all shards into sequences. Sequence i is a pure function of (seed, i).
6. `mixture` takes the sequences of several corpora in a fixed proportion. `contiguous` lets each row of a
   batch continue where it ended in the step before. `stream` reads shards, in order, while step 2 still
   writes them.
7. `sampler` tells which sequences each rank reads at a step, reads ahead, and packs documents.

`open_dataset` builds steps 5 and 6 from a prepared folder; `config` has the settings of all steps.
"""
