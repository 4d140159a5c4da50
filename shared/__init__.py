"""What both jobs must agree on: the exchange on disk, its names, its checks and its errors.

Glossary; one word, one thing:

base            the frozen pre-trained checkpoint directory that every version is made from
adapter         the trained LoRA factors, in PEFT's own directory format
exchange        the directory through which trainer and server meet (docs/format.md)
version         one published policy; its number is its slot in the log, never used twice
shard           one safetensors file of a version: the tensors of one decoder layer, or the outer ones
manifest        what a version holds: every file and tensor with its digest
publication     the writing of one version, from its new directory to its commit
commit          the creation of the version's log entry; the one act by which a version appears
log             dense, numbered, exclusively created entries: the truth about epochs and versions
epoch           the reign of one writer; an older writer cannot append after a newer epoch
writer          the one process (rank 0 of a trainer) that may publish into an exchange
store           the place an exchange lies in: a directory, or a prefix of a bucket
retained        kept by the newest word of the log on retention; what is not may be deleted
pin             an entry of the log by which people keep a version for good
lease           a reader's sign that it is reading a version, so that nobody deletes it
apply           what a server does to make a version the one that answers
active version  the version whose weights answer now
fold            merging the adapter into the server's own base
probe           token sequences whose logprobs a server must reproduce
run             one life of a training job, named by its run id
"""
