"""Everything that happens to a sample between its prompt and its batch. Start at `scheduler.Scheduler.take`.

A sample is a value. Its state (`Sample.need`) says what it waits for, and `book.py` holds the newest value of each, so
that a checkpoint can be written at any moment. Two loops carry samples on, `scheduler.py` in rounds and `continuous.py`
as a stream, and both take the same steps:

    RolloutBook.admit        a prompt is drawn, and each of its samples needs tokens
    RolloutBook.start        a request for a sample is on its way
    Dispatcher.grow          an engine samples one piece, and the reply is checked
    RolloutBook.grow         the piece joins its sample, which needs more tokens, or whose turn has ended
    RolloutBook.release      the request is over; without a reply, the sample stays as it was and is asked for again
    RolloutBook.waiting_in   samples whose turn has ended are due: each alone, or as a group that needs no more tokens
    advanced                 the driver answers: an environment with the next turn's tokens, or a judge with a reward
    Annotators.annotated     a sample that has ended gets values for its tokens, if the run has annotators
    RolloutBook.answer       the answer joins its sample, which needs tokens again, or has ended
    RolloutBook.settle       once all samples of a group have ended, the group waits to be trained, or is dropped
    RolloutBook.choose       a step takes its groups, the stalest first

What is trained next is in buffer/, and what a reward becomes there is `BatchBuilder.build`.
"""
