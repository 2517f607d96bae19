"""Documents: raw BSON as the server sends it, into Arrow columns; which columns those are; the order of keys. Pure.

==============================================  ====================================================================
module                                          what it gives
==============================================  ====================================================================
:mod:`~.documents.types`                        the types that a column can be declared with
:mod:`~.documents.columns`                      the columns of a collection: declared, from a sample, or one document
:mod:`~.documents.decoder`                      ``DocumentDecoder``: raw documents to a RecordBatch of those columns
:mod:`~.documents.events`                       ``EventDecoder``: raw events of a change stream to a RecordBatch
:mod:`~.documents.key_order`                    bytes that sort as MongoDB sorts values of any type
==============================================  ====================================================================
"""
