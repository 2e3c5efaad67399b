"""Oracle of standard errors: the jackknife over documents, by leaving out each document in turn."""

import math

import numpy


def jackknife(values, documents=None):
    """Return the mean of the values that are not NaN, its standard error, the number of documents, and the degrees of
    freedom. By default, each value has a document of its own.
    """
    values = numpy.asarray(values, dtype=float)
    documents = numpy.arange(len(values)) if documents is None else numpy.asarray(documents)
    values, documents = values[~numpy.isnan(values)], documents[~numpy.isnan(values)]
    names, sizes = numpy.unique(documents, return_counts=True)
    if not len(values):
        return math.nan, math.nan, 0, 0
    if len(names) < 2:
        return values.mean(), math.nan, 1, 0
    without = numpy.array([values[documents != name].mean() for name in names])
    variance = (len(names) - 1) / len(names) * numpy.square(without - values.mean()).sum()
    shares = sizes / len(values)
    return values.mean(), math.sqrt(variance), len(names), 1 / numpy.square(shares).sum() - 1
