/* The compiled half of headwater.sources.postgres: decodes pgoutput rows into columns, and arrays into their elements.
 *
 * It does what PythonDecoder in decoder.py does, byte for byte, and one test suite runs over both. Rules:
 * - every read is checked against the end of its message; whatever is wrong raises SourceProtocolError;
 * - a message is taken whole or not at all: rows are counted only after the last byte of the message was right;
 * - no Python object per value: columns grow in bytes objects, which Arrow then takes without a copy.
 */
#include "../_arrow_builders.h"

#define HEADER 25
#define POSTGRES_EPOCH_US UINT64_C(946684800000000)
#define OP_INSERT 1
#define OP_DELETE 2
#define OP_UPDATE_INSERT 3
#define OP_UPDATE_DELETE 4
#define LAST_SEQ UINT32_C(0xFFFFFFFE)

static PyObject *protocol_error;

static void fail(const char *reason) { raise_made(protocol_error, reason); }

/* ------------------------------------------------------------------------------------------------ relations */

typedef struct {
    Buffer data;
    Buffer offsets; /* int32, one more than rows */
    Buffer valid;   /* one byte per row: 1 value, 0 null, 2 unchanged (bit 0 is what Arrow wants) */
    bool has_unchanged;
} Column;

typedef struct {
    uint32_t oid;
    bool ignored;
    Py_ssize_t columns, rows;
    int64_t bytes; /* an upper bound of what one column holds */
    Column *column;
    char *is_key;
    Buffer ops, commit_lsn, seq, xid, commit_time;
} Relation;

typedef struct {
    PyObject_HEAD
    Relation **relations;
    Py_ssize_t relation_count;
    Relation *newest;
    bool in_transaction, streamed, has_commit;
    uint64_t commit_lsn;
    int64_t commit_time;
    uint32_t xid, next_seq;
    uint64_t last_commit_lsn, last_end_lsn;
    int64_t last_commit_time;
    Py_ssize_t held_rows, held_bytes;
} Decoder;

static void relation_free(Relation *relation) {
    if (relation == NULL) return;
    for (Py_ssize_t place = 0; relation->column != NULL && place < relation->columns; place++) {
        buffer_clear(&relation->column[place].data);
        buffer_clear(&relation->column[place].offsets);
        buffer_clear(&relation->column[place].valid);
    }
    buffer_clear(&relation->ops);
    buffer_clear(&relation->commit_lsn);
    buffer_clear(&relation->seq);
    buffer_clear(&relation->xid);
    buffer_clear(&relation->commit_time);
    PyMem_Free(relation->column);
    PyMem_Free(relation->is_key);
    PyMem_Free(relation);
}

static Relation *relation_find(Decoder *self, uint32_t oid) {
    if (self->newest != NULL && self->newest->oid == oid) return self->newest;
    Py_ssize_t low = 0, high = self->relation_count;
    while (low < high) {
        Py_ssize_t middle = low + (high - low) / 2;
        if (self->relations[middle]->oid < oid) low = middle + 1;
        else high = middle;
    }
    if (low == self->relation_count || self->relations[low]->oid != oid) return NULL;
    return self->newest = self->relations[low];
}

/* Puts *relation* into the list, which is sorted by oid; takes ownership of it in every case. */
static int relation_put(Decoder *self, Relation *relation) {
    Py_ssize_t place = 0;
    while (place < self->relation_count && self->relations[place]->oid < relation->oid) place++;
    self->newest = NULL;
    if (place < self->relation_count && self->relations[place]->oid == relation->oid) {
        if (self->relations[place]->rows > 0) {
            relation_free(relation);
            PyErr_SetString(PyExc_ValueError, "rows of the relation are held: take() them first");
            return -1;
        }
        relation_free(self->relations[place]);
        self->relations[place] = relation;
        return 0;
    }
    Relation **grown = PyMem_Realloc(self->relations, sizeof(Relation *) * (size_t)(self->relation_count + 1));
    if (grown == NULL) {
        relation_free(relation);
        PyErr_NoMemory();
        return -1;
    }
    self->relations = grown;
    memmove(grown + place + 1, grown + place, sizeof(Relation *) * (size_t)(self->relation_count - place));
    grown[place] = relation;
    self->relation_count++;
    return 0;
}

static Relation *relation_new(unsigned long long oid, Py_ssize_t columns) {
    if (oid > UINT32_MAX || columns < 0 || columns > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "an oid has 32 bits, a relation at most 65535 columns");
        return NULL;
    }
    Relation *relation = PyMem_Calloc(1, sizeof(Relation));
    if (relation == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    relation->oid = (uint32_t)oid;
    relation->columns = columns;
    relation->column = PyMem_Calloc((size_t)columns + 1, sizeof(Column));
    relation->is_key = PyMem_Calloc((size_t)columns + 1, 1);
    if (relation->column == NULL || relation->is_key == NULL) {
        relation_free(relation);
        PyErr_NoMemory();
        return NULL;
    }
    return relation;
}

static PyObject *decoder_add_relation(Decoder *self, PyObject *args) {
    unsigned long long oid;
    Py_ssize_t columns;
    PyObject *keys;
    if (!PyArg_ParseTuple(args, "KnO", &oid, &columns, &keys)) return NULL;
    Relation *relation = relation_new(oid, columns);
    if (relation == NULL) return NULL;
    PyObject *places = PySequence_Fast(keys, "key_columns is a sequence of places");
    if (places == NULL) {
        relation_free(relation);
        return NULL;
    }
    for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(places); index++) {
        Py_ssize_t place = PyNumber_AsSsize_t(PySequence_Fast_GET_ITEM(places, index), PyExc_OverflowError);
        if (place < 0 || place >= columns) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a key column is none of the columns");
            Py_DECREF(places);
            relation_free(relation);
            return NULL;
        }
        relation->is_key[place] = 1;
    }
    Py_DECREF(places);
    if (relation_put(self, relation) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *decoder_ignore_relation(Decoder *self, PyObject *args) {
    unsigned long long oid;
    if (!PyArg_ParseTuple(args, "K", &oid)) return NULL;
    Relation *relation = relation_new(oid, 0);
    if (relation == NULL) return NULL;
    relation->ignored = true;
    if (relation_put(self, relation) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ------------------------------------------------------------------------------------------------ messages */

typedef struct {
    const unsigned char *at, *end;
} Cursor;

static inline bool has(const Cursor *read, Py_ssize_t bytes) { return read->end - read->at >= bytes; }

static inline uint32_t be32(const unsigned char *at) {
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t be64(const unsigned char *at) { return (uint64_t)be32(at) << 32 | be32(at + 4); }

static inline int64_t time_of(const unsigned char *at) { return (int64_t)(be64(at) + POSTGRES_EPOCH_US); }

/* Room for a value of *length* bytes as row *row* of a column; where it goes, or NULL with an error. */
static inline char *value_room(Column *column, Py_ssize_t row, Py_ssize_t length) {
    int32_t start = 0;
    if (buffer_room(&column->offsets, (row + 2) * 4) < 0 || buffer_room(&column->valid, row + 1) < 0) return NULL;
    int32_t *offsets = (int32_t *)column->offsets.at;
    if (row == 0) offsets[0] = 0;
    else start = offsets[row];
    if (length > INT32_MAX - start) {
        fail("a column holds more than 2 GiB.");
        return NULL;
    }
    if (buffer_room(&column->data, start + length + 1) < 0) return NULL; /* one more: never NULL */
    offsets[row + 1] = start + (int32_t)length;
    column->valid.at[row] = 1;
    return column->data.at + start;
}

static inline int value_none(Column *column, Py_ssize_t row, char mark) {
    if (value_room(column, row, 0) == NULL) return -1;
    column->valid.at[row] = mark;
    return 0;
}

/* Row *to* gets the value that row *from* has. */
static int value_copy(Column *column, Py_ssize_t from, Py_ssize_t to) {
    if (column->valid.at[from] != 1) return value_none(column, to, column->valid.at[from]);
    const int32_t *offsets = (const int32_t *)column->offsets.at;
    int32_t start = offsets[from], length = offsets[from + 1] - start;
    char *place = value_room(column, to, length);
    if (place == NULL) return -1;
    memcpy(place, column->data.at + start, (size_t)length);
    return 0;
}

static bool value_equal(const Column *column, Py_ssize_t one, Py_ssize_t other) {
    const int32_t *offsets = (const int32_t *)column->offsets.at;
    int32_t length = offsets[one + 1] - offsets[one];
    return column->valid.at[one] == column->valid.at[other] && length == offsets[other + 1] - offsets[other]
        && memcmp(column->data.at + offsets[one], column->data.at + offsets[other], (size_t)length) == 0;
}

/* One tuple as row *row*. key_only: columns beside the key are null. old: the row before to fill unchanged values from. */
static int tuple(Relation *relation, Cursor *read, Py_ssize_t row, bool key_only, Py_ssize_t old) {
    if (!has(read, 2)) return fail("a row is cut off."), -1;
    Py_ssize_t count = read->at[0] << 8 | read->at[1];
    read->at += 2;
    if (count != relation->columns) return fail("a row has another number of columns than its table."), -1;
    for (Py_ssize_t place = 0; place < count; place++) {
        Column *column = &relation->column[place];
        if (!has(read, 1)) return fail("a row is cut off."), -1;
        unsigned char kind = *read->at++;
        if (kind == 't') {
            if (!has(read, 4)) return fail("a row is cut off."), -1;
            Py_ssize_t length = (Py_ssize_t)be32(read->at);
            read->at += 4;
            if (!has(read, length)) return fail("a row is cut off."), -1;
            if (key_only && !relation->is_key[place]) {
                if (value_none(column, row, 0) < 0) return -1;
            } else {
                char *to = value_room(column, row, length);
                if (to == NULL) return -1;
                memcpy(to, read->at, (size_t)length);
            }
            read->at += length;
        } else if (kind == 'n') {
            if (value_none(column, row, 0) < 0) return -1;
        } else if (kind == 'u') {
            if (key_only && !relation->is_key[place]) {
                if (value_none(column, row, 0) < 0) return -1;
            } else if (old >= 0 && column->valid.at[old] == 1) {
                if (value_copy(column, old, row) < 0) return -1;
            } else if (value_none(column, row, 2) < 0) {
                return -1;
            }
        } else {
            return fail("a value is neither text, null nor unchanged."), -1;
        }
    }
    return 0;
}

/* What a row carries beside its columns. */
static int stamp(Decoder *self, Relation *relation, Py_ssize_t row, int8_t op, uint32_t seq) {
    if (buffer_room(&relation->ops, row + 1) < 0 || buffer_room(&relation->commit_lsn, (row + 1) * 8) < 0
        || buffer_room(&relation->seq, (row + 1) * 4) < 0 || buffer_room(&relation->xid, (row + 1) * 4) < 0
        || buffer_room(&relation->commit_time, (row + 1) * 8) < 0)
        return -1;
    relation->ops.at[row] = op;
    ((uint64_t *)relation->commit_lsn.at)[row] = self->commit_lsn;
    ((uint32_t *)relation->seq.at)[row] = seq;
    ((uint32_t *)relation->xid.at)[row] = self->xid;
    ((int64_t *)relation->commit_time.at)[row] = self->commit_time;
    return 0;
}

/* Unchanged values count only once their message is whole. */
static void note_unchanged(Relation *relation, Py_ssize_t row) {
    for (Py_ssize_t place = 0; place < relation->columns; place++)
        if (relation->column[place].valid.at[row] == 2) relation->column[place].has_unchanged = true;
}

/* A row message after its relation; what it holds is counted by the caller. Returns the number of rows, or -1. */
static Py_ssize_t row_message(Decoder *self, Relation *relation, unsigned char type, Cursor *read) {
    Py_ssize_t row = relation->rows;
    uint32_t seq = self->next_seq;
    if (!has(read, 1)) return fail("a row is cut off."), -1;
    unsigned char part = *read->at++;
    if (type == 'I') {
        if (part != 'N') return fail("an insert has no new row."), -1;
        if (tuple(relation, read, row, false, -1) < 0 || stamp(self, relation, row, OP_INSERT, seq) < 0) return -1;
        return 1;
    }
    if (type == 'D') {
        if (part != 'K' && part != 'O') return fail("a delete has no old row."), -1;
        if (tuple(relation, read, row, part == 'K', -1) < 0) return -1;
        return stamp(self, relation, row, OP_DELETE, seq) < 0 ? -1 : 1;
    }
    if (part == 'N') {
        if (tuple(relation, read, row, false, -1) < 0) return -1;
        return stamp(self, relation, row, OP_UPDATE_INSERT, seq) < 0 ? -1 : 1;
    }
    if (part != 'K' && part != 'O') return fail("an update has neither an old nor a new row."), -1;
    if (tuple(relation, read, row, part == 'K', -1) < 0) return -1;
    if (!has(read, 1) || *read->at++ != 'N') return fail("an update has no new row."), -1;
    if (tuple(relation, read, row + 1, false, row) < 0) return -1;
    if (part == 'O') {
        if (stamp(self, relation, row, OP_UPDATE_DELETE, seq) < 0) return -1;
        return stamp(self, relation, row + 1, OP_UPDATE_INSERT, seq + 1) < 0 ? -1 : 2;
    }
    bool same_key = true;
    for (Py_ssize_t place = 0; place < relation->columns && same_key; place++)
        if (relation->is_key[place]) same_key = value_equal(&relation->column[place], row, row + 1);
    if (same_key) {
        /* The server tells the key also where it is the same but stored out of line: the old row is not one of ours. */
        for (Py_ssize_t place = 0; place < relation->columns; place++) {
            Column *column = &relation->column[place];
            int32_t *offsets = (int32_t *)column->offsets.at;
            int32_t old_length = offsets[row + 1] - offsets[row], length = offsets[row + 2] - offsets[row + 1];
            memmove(column->data.at + offsets[row], column->data.at + offsets[row] + old_length, (size_t)length);
            offsets[row + 1] = offsets[row] + length;
            column->valid.at[row] = column->valid.at[row + 1];
        }
        return stamp(self, relation, row, OP_UPDATE_INSERT, seq + 1) < 0 ? -1 : 1;
    }
    if (stamp(self, relation, row, OP_DELETE, seq) < 0) return -1;
    return stamp(self, relation, row + 1, OP_INSERT, seq + 1) < 0 ? -1 : 2;
}

static bool is_for_python(unsigned char type) {
    return type != '\0' && strchr("RYTMOSEcA", type) != NULL;
}

static int begin_message(Decoder *self, Cursor *read) {
    if (self->in_transaction) return fail("a transaction begins inside another."), -1;
    if (read->end - read->at != 20) return fail("a begin has the wrong length."), -1;
    self->commit_lsn = be64(read->at);
    self->commit_time = time_of(read->at + 8);
    self->xid = be32(read->at + 16);
    self->next_seq = 0;
    self->in_transaction = true;
    return 0;
}

static int commit_message(Decoder *self, Cursor *read) {
    if (!self->in_transaction || self->streamed) return fail("a commit without its begin."), -1;
    if (read->end - read->at != 25) return fail("a commit has the wrong length."), -1;
    if (be64(read->at + 1) != self->commit_lsn) return fail("a commit is not that of its begin."), -1;
    self->last_commit_lsn = self->commit_lsn;
    self->last_end_lsn = be64(read->at + 9);
    self->last_commit_time = time_of(read->at + 17);
    self->has_commit = true;
    self->in_transaction = false;
    return 0;
}

/* 1: taken; 0: left because the limits are reached; -1: an error. */
static int take_row(Decoder *self, unsigned char type, Cursor *read, Py_ssize_t length, Py_ssize_t max_rows,
                    Py_ssize_t max_bytes) {
    if (self->held_rows >= max_rows || self->held_bytes >= max_bytes) return 0;
    if (!self->in_transaction) return fail("a row outside of a transaction."), -1;
    if (self->streamed) {
        if (!has(read, 4)) return fail("a row is cut off."), -1;
        read->at += 4;
    }
    if (!has(read, 5)) return fail("a row is cut off."), -1;
    Relation *relation = relation_find(self, be32(read->at));
    read->at += 4;
    if (relation == NULL) return fail("a row of a table that was not described."), -1;
    bool has_both = type == 'U' && *read->at != 'N';
    if (self->next_seq >= LAST_SEQ) return fail("a transaction has more rows than can be numbered."), -1;
    if (!relation->ignored) {
        int64_t bytes = has_both ? 2 * (int64_t)length : (int64_t)length;
        if (relation->rows > 0 && relation->bytes + bytes > INT32_MAX) return 0;
        Py_ssize_t rows = row_message(self, relation, type, read);
        if (rows < 0) return -1;
        if (read->at != read->end) return fail("a row message has the wrong length."), -1;
        for (Py_ssize_t row = relation->rows; row < relation->rows + rows; row++) note_unchanged(relation, row);
        relation->rows += rows;
        relation->bytes += bytes;
        self->held_rows += rows;
        self->held_bytes += length;
    }
    self->next_seq += has_both ? 2 : 1;
    return 1;
}

static PyObject *decoder_feed(Decoder *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"messages", "start", "max_rows", "max_bytes", "stop_at_commit", NULL};
    PyObject *messages;
    Py_ssize_t start, max_rows, max_bytes;
    int stop_at_commit;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!n$nnp", names, &PyList_Type, &messages, &start, &max_rows,
                                     &max_bytes, &stop_at_commit))
        return NULL;
    if (start < 0 || max_rows < 1 || max_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "start is at least 0, max_rows and max_bytes at least 1");
        return NULL;
    }
    Py_ssize_t place = start;
    for (; place < PyList_GET_SIZE(messages); place++) {
        PyObject *message = PyList_GET_ITEM(messages, place);
        if (!PyBytes_Check(message)) {
            PyErr_SetString(PyExc_TypeError, "a raw message is bytes");
            return NULL;
        }
        Py_ssize_t length = PyBytes_GET_SIZE(message);
        const unsigned char *at = (const unsigned char *)PyBytes_AS_STRING(message);
        if (length <= HEADER || at[0] != 'w') return fail("a message is cut off, or is no WAL data."), NULL;
        unsigned char type = at[HEADER];
        Cursor read = {at + HEADER + 1, at + length};
        if (type == 'I' || type == 'U' || type == 'D') {
            int taken = take_row(self, type, &read, length, max_rows, max_bytes);
            if (taken < 0) return NULL;
            if (taken == 0) break;
        } else if (type == 'B') {
            if (begin_message(self, &read) < 0) return NULL;
        } else if (type == 'C') {
            if (commit_message(self, &read) < 0) return NULL;
            if (stop_at_commit) {
                place++;
                break;
            }
        } else if (is_for_python(type)) {
            break;
        } else {
            return fail("a message of an unknown type."), NULL;
        }
    }
    return PyLong_FromSsize_t(place);
}

static PyObject *decoder_begin_streamed(Decoder *self, PyObject *args) {
    unsigned long long commit_lsn, xid;
    long long commit_time;
    if (!PyArg_ParseTuple(args, "KLK", &commit_lsn, &commit_time, &xid)) return NULL;
    if (self->in_transaction) return fail("a streamed transaction begins inside another."), NULL;
    self->commit_lsn = commit_lsn;
    self->commit_time = commit_time;
    self->xid = (uint32_t)xid;
    self->next_seq = 0;
    self->in_transaction = self->streamed = true;
    Py_RETURN_NONE;
}

static PyObject *decoder_end_streamed(Decoder *self, PyObject *Py_UNUSED(none)) {
    if (!self->streamed) return fail("a streamed transaction ends that did not begin."), NULL;
    self->in_transaction = self->streamed = false;
    Py_RETURN_NONE;
}

/* (data, offsets, validity or None, nulls, unchanged or None) */
static PyObject *column_take(Column *column, Py_ssize_t rows) {
    Py_ssize_t nulls = 0;
    PyObject *validity = packed(column->valid.at, rows, &nulls);
    if (validity == NULL) return NULL;
    PyObject *unchanged = Py_None;
    Py_INCREF(unchanged);
    if (column->has_unchanged) {
        for (Py_ssize_t row = 0; row < rows; row++) column->valid.at[row] = column->valid.at[row] == 2;
        Py_SETREF(unchanged, buffer_take(&column->valid, rows));
    }
    buffer_clear(&column->valid);
    column->has_unchanged = false;
    int32_t used = ((const int32_t *)column->offsets.at)[rows];
    PyObject *data = buffer_take(&column->data, used), *offsets = buffer_take(&column->offsets, (rows + 1) * 4);
    if (data == NULL || offsets == NULL || unchanged == NULL) {
        Py_XDECREF(data);
        Py_XDECREF(offsets);
        Py_XDECREF(unchanged);
        Py_DECREF(validity);
        return NULL;
    }
    return Py_BuildValue("NNNnN", data, offsets, validity, nulls, unchanged);
}

static PyObject *relation_take(Relation *relation) {
    Py_ssize_t rows = relation->rows;
    relation->rows = 0;
    relation->bytes = 0;
    PyObject *columns = PyList_New(relation->columns);
    if (columns == NULL) return NULL;
    for (Py_ssize_t place = 0; place < relation->columns; place++) {
        PyObject *column = column_take(&relation->column[place], rows);
        if (column == NULL) {
            Py_DECREF(columns);
            return NULL;
        }
        PyList_SET_ITEM(columns, place, column);
    }
    return Py_BuildValue("InNNNNNN", (unsigned int)relation->oid, rows, buffer_take(&relation->ops, rows),
                         buffer_take(&relation->commit_lsn, rows * 8), buffer_take(&relation->seq, rows * 4),
                         buffer_take(&relation->xid, rows * 4), buffer_take(&relation->commit_time, rows * 8), columns);
}

static PyObject *decoder_take(Decoder *self, PyObject *Py_UNUSED(none)) {
    PyObject *taken = PyList_New(0);
    if (taken == NULL) return NULL;
    for (Py_ssize_t place = 0; place < self->relation_count; place++) {
        if (self->relations[place]->rows == 0) continue;
        PyObject *rows = relation_take(self->relations[place]);
        if (rows == NULL || PyList_Append(taken, rows) < 0) {
            Py_XDECREF(rows);
            Py_DECREF(taken);
            return NULL;
        }
        Py_DECREF(rows);
    }
    self->held_rows = self->held_bytes = 0;
    return taken;
}

static PyObject *get_held_rows(Decoder *self, void *Py_UNUSED(none)) { return PyLong_FromSsize_t(self->held_rows); }

static PyObject *get_held_bytes(Decoder *self, void *Py_UNUSED(none)) { return PyLong_FromSsize_t(self->held_bytes); }

static PyObject *get_in_transaction(Decoder *self, void *Py_UNUSED(none)) {
    return PyBool_FromLong(self->in_transaction);
}

static PyObject *get_transaction(Decoder *self, void *Py_UNUSED(none)) {
    if (!self->in_transaction) Py_RETURN_NONE;
    return Py_BuildValue("KLI", (unsigned long long)self->commit_lsn, (long long)self->commit_time,
                         (unsigned int)self->xid);
}

static PyObject *get_last_commit(Decoder *self, void *Py_UNUSED(none)) {
    if (!self->has_commit) Py_RETURN_NONE;
    return Py_BuildValue("KKL", (unsigned long long)self->last_commit_lsn, (unsigned long long)self->last_end_lsn,
                         (long long)self->last_commit_time);
}

static PyObject *get_next_seq(Decoder *self, void *Py_UNUSED(none)) { return PyLong_FromUnsignedLong(self->next_seq); }

static int set_next_seq(Decoder *self, PyObject *value, void *Py_UNUSED(none)) {
    unsigned long seq = value == NULL ? UINT32_MAX : PyLong_AsUnsignedLong(value);
    if (PyErr_Occurred()) return -1;
    if (seq > LAST_SEQ) {
        PyErr_SetString(PyExc_ValueError, "next_seq has 32 bits");
        return -1;
    }
    self->next_seq = (uint32_t)seq;
    return 0;
}

static void decoder_dealloc(Decoder *self) {
    for (Py_ssize_t place = 0; place < self->relation_count; place++) relation_free(self->relations[place]);
    PyMem_Free(self->relations);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef decoder_methods[] = {
    {"add_relation", (PyCFunction)decoder_add_relation, METH_VARARGS, NULL},
    {"ignore_relation", (PyCFunction)decoder_ignore_relation, METH_VARARGS, NULL},
    {"begin_streamed", (PyCFunction)decoder_begin_streamed, METH_VARARGS, NULL},
    {"end_streamed", (PyCFunction)decoder_end_streamed, METH_NOARGS, NULL},
    {"feed", (PyCFunction)(void (*)(void))decoder_feed, METH_VARARGS | METH_KEYWORDS, NULL},
    {"take_buffers", (PyCFunction)decoder_take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef decoder_values[] = {
    {"held_rows", (getter)get_held_rows, NULL, NULL, NULL},
    {"held_bytes", (getter)get_held_bytes, NULL, NULL, NULL},
    {"in_transaction", (getter)get_in_transaction, NULL, NULL, NULL},
    {"transaction", (getter)get_transaction, NULL, NULL, NULL},
    {"last_commit", (getter)get_last_commit, NULL, NULL, NULL},
    {"next_seq", (getter)get_next_seq, (setter)set_next_seq, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject DecoderType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "headwater.sources.postgres._decoder.Decoder",
    .tp_basicsize = sizeof(Decoder),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)decoder_dealloc,
    .tp_methods = decoder_methods,
    .tp_getset = decoder_values,
};

/* ------------------------------------------------------------------------------------------------ array text */

#define ARRAY_FINE 0
#define ARRAY_SPECIAL 1   /* several dimensions, or lower bounds */
#define ARRAY_MALFORMED 2

typedef struct {
    char *data;
    int32_t *offsets;
    char *valid;
    Py_ssize_t count;
    int32_t used;
} Elements;

/* Appends the elements of one array to *into*, for which there is room. */
static char array_elements(const char *at, const char *end, Elements *into) {
    if (at < end && *at == '[') return ARRAY_SPECIAL;
    if (end - at < 2 || *at != '{' || end[-1] != '}') return ARRAY_MALFORMED;
    at++;
    end--; /* the closing brace is what ends the last element */
    if (at < end && *at == '{') return ARRAY_SPECIAL;
    bool more = at < end;
    while (more) {
        char *to = into->data + into->used, *first = to;
        bool is_null = false;
        if (at < end && *at == '"') {
            for (at++;; at++) {
                if (at >= end) return ARRAY_MALFORMED;
                if (*at == '"') break;
                if (*at == '\\' && ++at >= end) return ARRAY_MALFORMED;
                *to++ = *at;
            }
            at++;
        } else {
            for (; at < end && *at != ','; at++) {
                if (*at == '"' || *at == '\\' || *at == '{' || *at == '}') return ARRAY_MALFORMED;
                *to++ = *at;
            }
            if (to == first) return ARRAY_MALFORMED;
            is_null = to - first == 4 && memcmp(first, "NULL", 4) == 0;
            if (is_null) to = first;
        }
        if (at < end && *at != ',') return ARRAY_MALFORMED;
        into->valid[into->count] = !is_null;
        into->used += (int32_t)(to - first);
        into->offsets[++into->count] = into->used;
        more = at < end;
        at++;
    }
    return ARRAY_FINE;
}

/* split_arrays(offsets, data, valid, rows) -> (list offsets, states, elements, data, offsets, validity or None, nulls) */
static PyObject *split_arrays(PyObject *Py_UNUSED(module), PyObject *args) {
    Py_buffer offsets, data, valid;
    Py_ssize_t rows;
    if (!PyArg_ParseTuple(args, "y*y*y*n", &offsets, &data, &valid, &rows)) return NULL;
    PyObject *answer = NULL;
    const int32_t *from = offsets.buf;
    Buffer lists = {0}, states = {0}, text = {0}, places = {0}, present = {0};
    if (rows < 0 || offsets.len / 4 < rows + 1 || valid.len < rows || from[0] < 0 || data.len > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "the buffers do not hold so many rows");
        goto done;
    }
    /* An element takes at least one byte and what parts it from the next: half as many elements as bytes, and one. */
    if (buffer_room(&lists, (rows + 1) * 4) < 0 || buffer_room(&states, rows + 1) < 0
        || buffer_room(&text, data.len + 1) < 0 || buffer_room(&places, (data.len / 2 + 2) * 4) < 0
        || buffer_room(&present, data.len / 2 + 2) < 0)
        goto done;
    Elements into = {text.at, (int32_t *)places.at, present.at, 0, 0};
    into.offsets[0] = 0;
    int32_t *list_offsets = (int32_t *)lists.at;
    list_offsets[0] = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        char state = ARRAY_FINE;
        if (from[row + 1] < from[row] || from[row + 1] > data.len) {
            PyErr_SetString(PyExc_ValueError, "the offsets do not fit the data");
            goto done;
        }
        if (((const char *)valid.buf)[row]) {
            Elements before = into;
            state = array_elements((const char *)data.buf + from[row], (const char *)data.buf + from[row + 1], &into);
            if (state != ARRAY_FINE) into = before;
        }
        states.at[row] = state;
        list_offsets[row + 1] = (int32_t)into.count;
    }
    Py_ssize_t nulls;
    PyObject *validity = packed(present.at, into.count, &nulls);
    if (validity == NULL) goto done;
    answer = Py_BuildValue("NNnNNNn", buffer_take(&lists, (rows + 1) * 4), buffer_take(&states, rows), into.count,
                           buffer_take(&text, into.used), buffer_take(&places, (into.count + 1) * 4), validity, nulls);
done:
    buffer_clear(&lists);
    buffer_clear(&states);
    buffer_clear(&text);
    buffer_clear(&places);
    buffer_clear(&present);
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    PyBuffer_Release(&valid);
    return answer;
}

static PyMethodDef module_functions[] = {
    {"split_arrays", split_arrays, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.postgres._decoder",
    .m_size = -1,
    .m_methods = module_functions,
};

PyMODINIT_FUNC PyInit__decoder(void) {
    PyObject *pgoutput = PyImport_ImportModule("headwater.sources.postgres.pgoutput");
    if (pgoutput == NULL) return NULL;
    protocol_error = PyObject_GetAttrString(pgoutput, "protocol_error");
    Py_DECREF(pgoutput);
    if (protocol_error == NULL || PyType_Ready(&DecoderType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL) return NULL;
    if (PyModule_AddObjectRef(made, "Decoder", (PyObject *)&DecoderType) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
