/* Decodes raw BSON documents into the buffers of Arrow columns; headwater.sources.mongodb.documents.layout tells what is
 * asked for and what is given.
 *
 * It does what python_documents.py does, value for value, and one test suite runs over both. Rules:
 * - every read is checked against the end of what holds it; whatever is wrong ends the batch with a ValueError that says
 *   why and holds no value;
 * - nested documents are followed MOST_NESTED levels deep and no further;
 * - no Python object per value: columns grow in memory of their own, without the interpreter's lock, and Arrow takes that
 *   memory without a copy.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <locale.h>
#ifdef __APPLE__
#include <xlocale.h>
#endif

#include "_extended_json.h"
#include "_key_order.h"

/* What a column becomes: Kind in types.py. */
enum {
    AS_INT, AS_LONG, AS_DOUBLE, AS_BOOL, AS_STRING, AS_OBJECT_ID, AS_DATE, AS_TIMESTAMP, AS_DECIMAL_TEXT, AS_DECIMAL,
    AS_BINARY, AS_UUID, AS_JSON, AS_KEY, AS_RAW, AS_STRUCT, AS_LIST, AS_DOCUMENT, AS_REST, KINDS
};

#define FOUND_MIN_KEY (1u << 20)
#define FOUND_MAX_KEY (1u << 21)
#define FOUND_MISSING (1u << 22)
#define FOUND_NO_TEXT (1u << 23)
#define FOUND_INEXACT (1u << 24)
#define FOUND_SUBTYPE (1u << 25)

#define MOST_CHILDREN 65536
#define FIRST_MS INT64_C(-62135596800000) /* the years 1 to 9999 */
#define LAST_MS INT64_C(253402300799999)
#define MOST_DATA INT32_MAX

static locale_t plain_locale; /* numbers with a point, whatever the process is set to */

/* ------------------------------------------------------------------------------------------------ columns */

typedef struct Node {
    uint8_t *name; /* with the zero at its end */
    uint32_t name_size;
    uint8_t kind, digits, scale, width, required;
    uint32_t count, slots; /* children, and places of the table that finds them by name */
    struct Node *children;
    int32_t *table;
    int32_t same, follow; /* the next sibling of the same name, or -1; the sibling that is expected next */
    int64_t length, nulls, conflicts;
    uint32_t found;
    Bytes valid, values, data;
    size_t began; /* AS_REST: where the text of this row begins */
    uint8_t open, bad;
} Node;

typedef struct {
    Node root;
    bool busy;
} Plan;

static inline bool has_data(const Node *node) {
    return (node->kind >= AS_STRING && node->kind <= AS_OBJECT_ID) || node->kind == AS_DECIMAL_TEXT ||
           (node->kind >= AS_BINARY && node->kind <= AS_RAW) || node->kind >= AS_DOCUMENT;
}

static bool node_begin(Node *node) {
    node->length = node->nulls = node->conflicts = 0;
    node->found = 0;
    node->valid.used = node->values.used = node->data.used = 0;
    node->open = node->bad = 0;
    static const int32_t zero = 0;
    if ((has_data(node) || node->kind == AS_LIST) && !put(&node->values, &zero, 4)) return false;
    for (uint32_t place = 0; place < node->count; place++)
        if (!node_begin(&node->children[place])) return false;
    return true;
}

/* One more value is there: its bit. */
static inline int close_valid(State *state, Node *node) {
    if (node->nulls && (node->length & 7) == 0 && !put_byte(&node->valid, 0xFF)) return wrong(state, NO_MEMORY);
    node->length++;
    return DONE;
}

static inline int close_data(State *state, Node *node) {
    if (node->data.used > MOST_DATA) return wrong(state, "a column has more than 2 GiB");
    int32_t end = (int32_t)node->data.used;
    if (!put(&node->values, &end, 4)) return wrong(state, NO_MEMORY);
    return close_valid(state, node);
}

static int add_null(State *state, Node *node) {
    if (node->nulls == 0) {
        size_t bytes = (size_t)(node->length >> 3) + 1;
        node->valid.used = 0;
        if (!bytes_room(&node->valid, bytes)) return wrong(state, NO_MEMORY);
        memset(node->valid.at, 0xFF, bytes);
        node->valid.used = bytes;
    } else if ((node->length & 7) == 0 && !put_byte(&node->valid, 0xFF)) {
        return wrong(state, NO_MEMORY);
    }
    node->valid.at[node->length >> 3] &= (uint8_t)~(1u << (node->length & 7));
    node->nulls++;
    if (node->kind == AS_STRUCT) {
        for (uint32_t place = 0; place < node->count; place++)
            if (add_null(state, &node->children[place]) != DONE) return WRONG;
    } else if (node->kind == AS_BOOL) {
        if ((node->length & 7) == 0 && !put_byte(&node->values, 0)) return wrong(state, NO_MEMORY);
    } else if (node->kind == AS_LIST || has_data(node)) {
        if (!bytes_room(&node->values, 4)) return wrong(state, NO_MEMORY);
        memcpy(node->values.at + node->values.used, node->values.at + node->values.used - 4, 4);
        node->values.used += 4;
    } else {
        if (!bytes_room(&node->values, node->width)) return wrong(state, NO_MEMORY);
        memset(node->values.at + node->values.used, 0, node->width);
        node->values.used += node->width;
    }
    node->length++;
    return DONE;
}

static int refuse(State *state, Node *node, uint32_t found) {
    node->conflicts++;
    node->found |= found;
    return add_null(state, node);
}

static inline uint32_t found_bit(uint8_t kind) {
    return kind == MIN_KEY ? FOUND_MIN_KEY : kind == MAX_KEY ? FOUND_MAX_KEY : 1u << kind;
}

/* ------------------------------------------------------------------------------------------------ values */

static int take_fields(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth, Node *root);

static inline int add_fixed(State *state, Node *node, const void *value) {
    MUST(put(&node->values, value, node->width));
    return close_valid(state, node);
}

static inline int add_data(State *state, Node *node, const void *from, size_t size) {
    MUST(put(&node->data, from, size));
    return close_data(state, node);
}

static int take_whole(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    int64_t number;
    if (kind == INT) {
        number = int32_at(start);
    } else if (kind == LONG) {
        number = int64_at(start);
    } else if (kind == DOUBLE) {
        double real;
        memcpy(&real, start, 8);
        if (!(real >= -9223372036854775808.0 && real < 9223372036854775808.0)) return refuse(state, node, FOUND_INEXACT);
        number = (int64_t)real;
        if ((double)number != real || (number == 0 && signbit(real))) return refuse(state, node, FOUND_INEXACT);
    } else {
        return refuse(state, node, found_bit(kind));
    }
    if (node->kind == AS_INT) {
        int32_t narrow = (int32_t)number;
        if (narrow != number) return refuse(state, node, FOUND_INEXACT);
        return add_fixed(state, node, &narrow);
    }
    return add_fixed(state, node, &number);
}

static int take_double(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    if (kind == DOUBLE) return add_fixed(state, node, start);
    if (kind != INT && kind != LONG) return refuse(state, node, found_bit(kind));
    int64_t number = kind == INT ? int32_at(start) : int64_at(start);
    double real = (double)number;
    if (real >= 9223372036854775808.0 || (int64_t)real != number) return refuse(state, node, FOUND_INEXACT);
    return add_fixed(state, node, &real);
}

static int take_decimal(State *state, Node *node, uint8_t kind, const uint8_t *start) {
    Decimal decimal;
    if (kind == DECIMAL) read_decimal(start, &decimal);
    else if (kind == INT || kind == LONG) whole_decimal(kind == INT ? int32_at(start) : int64_at(start), &decimal);
    else return refuse(state, node, found_bit(kind));
    if (node->kind == AS_DECIMAL_TEXT) {
        MUST(put_decimal(&node->data, &decimal));
        return close_data(state, node);
    }
    uint64_t words[4];
    if (!to_units(&decimal, node->digits, node->scale, words)) return refuse(state, node, FOUND_INEXACT);
    return add_fixed(state, node, words);
}

static int take_bytes(State *state, Node *node, const uint8_t *start, const uint8_t *stop) {
    uint8_t subtype;
    if (!binary_content(state, &start, stop, &subtype)) return WRONG;
    if (node->kind == AS_BINARY && subtype == node->scale) return add_data(state, node, start, (size_t)(stop - start));
    if (node->kind == AS_BINARY || subtype != 4 || stop - start != 16) return refuse(state, node, FOUND_SUBTYPE);
    static const uint8_t PARTS[5] = {4, 2, 2, 2, 6};
    for (int part = 0; part < 5; part++) {
        if (part) MUST(put_byte(&node->data, '-'));
        MUST(put_hex(&node->data, start, PARTS[part]));
        start += PARTS[part];
    }
    return close_data(state, node);
}

/* Ends a value that was written to the data of *node* from *began* on. */
static int close_written(State *state, Node *node, size_t began, int ended) {
    if (ended == DONE) return close_data(state, node);
    node->data.used = began;
    return ended == NO_TEXT ? refuse(state, node, FOUND_NO_TEXT) : WRONG;
}

static int take(State *state, Node *node, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth);

static int take_list(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        if (take(state, node->children, element.kind, element.start, element.stop, depth) != DONE) return WRONG;
    }
    if (node->children->length > INT32_MAX) return wrong(state, "a column has more than 2 GiB");
    int32_t length = (int32_t)node->children->length;
    MUST(put(&node->values, &length, 4));
    return close_valid(state, node);
}

static int take(State *state, Node *node, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    size_t began = node->data.used;
    if (node->kind == AS_KEY)
        return close_written(state, node, began, put_key(state, &node->data, kind, start, stop, depth));
    if (kind == NULL_VALUE) return node->required ? refuse(state, node, found_bit(kind)) : add_null(state, node);
    switch (node->kind) {
    case AS_INT:
    case AS_LONG:
        return take_whole(state, node, kind, start);
    case AS_DOUBLE:
        return take_double(state, node, kind, start);
    case AS_BOOL:
        if (kind != BOOL) break;
        if ((node->length & 7) == 0) MUST(put_byte(&node->values, 0));
        node->values.at[node->length >> 3] |= (uint8_t)(*start << (node->length & 7));
        return close_valid(state, node);
    case AS_STRING:
        if (kind != STRING) break;
        if (!is_utf8(start + 4, (size_t)(stop - start) - 5)) return refuse(state, node, FOUND_NO_TEXT);
        return add_data(state, node, start + 4, (size_t)(stop - start) - 5);
    case AS_OBJECT_ID:
        if (kind != OBJECT_ID) break;
        MUST(put_hex(&node->data, start, 12));
        return close_data(state, node);
    case AS_DATE: {
        if (kind != DATE) break;
        int64_t ms = int64_at(start);
        if (ms > LAST_MS || ms < FIRST_MS) return refuse(state, node, FOUND_INEXACT);
        return add_fixed(state, node, &ms);
    }
    case AS_TIMESTAMP:
        if (kind != TIMESTAMP) break;
        return add_fixed(state, node, start);
    case AS_DECIMAL_TEXT:
    case AS_DECIMAL:
        return take_decimal(state, node, kind, start);
    case AS_BINARY:
    case AS_UUID:
        if (kind != BINARY) break;
        return take_bytes(state, node, start, stop);
    case AS_JSON:
        return close_written(state, node, began, put_value(state, &node->data, kind, start, stop, depth));
    case AS_RAW:
        if (kind != OBJECT) break;
        return add_data(state, node, start, (size_t)(stop - start));
    case AS_STRUCT:
        if (kind != OBJECT) break;
        if (take_fields(state, node, start, stop, depth + 1, NULL) != DONE) return WRONG;
        return close_valid(state, node);
    case AS_LIST:
        if (kind != ARRAY) break;
        return take_list(state, node, start, stop, depth + 1);
    }
    return refuse(state, node, found_bit(kind));
}

/* ------------------------------------------------------------------------------------------------ fields */

static inline uint32_t name_hash(const uint8_t *name, size_t size) {
    uint32_t hash = 2166136261u ^ (uint32_t)size;
    for (size_t place = 0; place < size; place++) hash = (hash ^ name[place]) * 16777619u;
    return hash ^ hash >> 15;
}

/* The first child of this name, or -1. */
static int32_t find_child(const Node *node, const uint8_t *name, size_t size) {
    if (node->slots == 0) return -1;
    for (uint32_t slot = name_hash(name, size) & (node->slots - 1);; slot = (slot + 1) & (node->slots - 1)) {
        int32_t place = node->table[slot];
        if (place < 0) return -1;
        const Node *child = &node->children[place];
        if (child->name_size == size && memcmp(child->name, name, size) == 0) return place;
    }
}

static int take_rest(State *state, Node *root, const Element *element) {
    for (uint32_t place = 0; place < root->count; place++) {
        Node *node = &root->children[place];
        if (node->kind != AS_REST) continue;
        size_t began = node->data.used;
        MUST(put_byte(&node->data, node->open ? ',' : '{'));
        int ended = put_field(state, &node->data, element, 0);
        if (ended == WRONG) return WRONG;
        if (ended == NO_TEXT) {
            node->data.used = began;
            node->bad = 1;
        } else {
            node->open = 1;
        }
    }
    return DONE;
}

/* The fields of the document in [at, end) into the children of *node*; root: it is the document itself. */
static int take_fields(State *state, Node *node, const uint8_t *at, const uint8_t *end, int depth, Node *root) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    int64_t row = node->length;
    int32_t expected = 0, count = (int32_t)node->count;
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        int32_t place = -1;
        if (expected < count) {
            const Node *child = &node->children[expected];
            if (end - at > (ptrdiff_t)child->name_size + 1 && child->kind < AS_DOCUMENT &&
                memcmp(at + 1, child->name, (size_t)child->name_size + 1) == 0) {
                element.kind = *at;
                element.name = at + 1;
                element.name_size = child->name_size;
                element.start = at + 2 + child->name_size;
                element.stop = value_end(state, element.kind, element.start, end);
                if (element.stop == NULL) return WRONG;
                place = expected;
            }
        }
        if (place < 0) {
            if (!next_element(state, at, end, &element)) return WRONG;
            place = find_child(node, element.name, element.name_size);
        }
        if (place < 0) {
            if (root != NULL && take_rest(state, root, &element) != DONE) return WRONG;
            continue;
        }
        expected = node->children[place].follow;
        for (; place >= 0; place = node->children[place].same) {
            Node *child = &node->children[place];
            if (child->length == row && take(state, child, element.kind, element.start, element.stop, depth) != DONE)
                return WRONG;
        }
    }
    for (uint32_t place = 0; place < node->count; place++) {
        Node *child = &node->children[place];
        if (child->length > row || child->kind == AS_REST) continue;
        if ((child->required ? refuse(state, child, FOUND_MISSING) : add_null(state, child)) != DONE) return WRONG;
    }
    return DONE;
}

static int take_document(State *state, Node *root, const uint8_t *at, const uint8_t *end) {
    bool rest = false;
    for (uint32_t place = 0; place < root->count; place++) {
        Node *node = &root->children[place];
        size_t began = node->data.used;
        if (node->kind == AS_DOCUMENT) {
            int ended = put_document(state, &node->data, at, end, 0, false);
            if (close_written(state, node, began, ended) != DONE) return WRONG;
        } else if (node->kind == AS_REST) {
            node->began = began;
            node->open = node->bad = 0;
            rest = true;
        }
    }
    if (take_fields(state, root, at, end, 0, rest ? root : NULL) != DONE) return WRONG;
    for (uint32_t place = 0; rest && place < root->count; place++) {
        Node *node = &root->children[place];
        if (node->kind != AS_REST) continue;
        int ended;
        if (node->bad) {
            node->data.used = node->began;
            ended = refuse(state, node, FOUND_NO_TEXT);
        } else if (node->open) {
            MUST(put_byte(&node->data, '}'));
            ended = close_data(state, node);
        } else {
            ended = add_null(state, node);
        }
        if (ended != DONE) return WRONG;
    }
    root->length++;
    return DONE;
}

/* ------------------------------------------------------------------------------------------------ blocks */

/* Memory that a column grew in, as Arrow takes it. */
typedef struct {
    PyObject_HEAD
    void *at;
    Py_ssize_t size;
} Block;

static void block_dealloc(PyObject *self) {
    free(((Block *)self)->at);
    Py_TYPE(self)->tp_free(self);
}

static int block_buffer(PyObject *self, Py_buffer *view, int flags) {
    Block *block = (Block *)self;
    return PyBuffer_FillInfo(view, self, block->at, block->size, 1, flags);
}

static PyBufferProcs block_as_buffer = {.bf_getbuffer = block_buffer};

static PyTypeObject block_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "headwater.sources.mongodb.documents._documents.Block",
    .tp_basicsize = sizeof(Block),
    .tp_dealloc = block_dealloc,
    .tp_as_buffer = &block_as_buffer,
    .tp_flags = Py_TPFLAGS_DEFAULT,
};

/* Gives the memory of *bytes* away. */
static PyObject *block_of(Bytes *bytes) {
    Block *block = PyObject_New(Block, &block_type);
    if (block == NULL) return NULL;
    /* the block of nothing has an address, too */
    void *fitted = bytes->room - bytes->used > bytes->room / 8 || bytes->at == NULL
                       ? realloc(bytes->at, bytes->used ? bytes->used : 8)
                       : bytes->at;
    block->at = fitted != NULL ? fitted : bytes->at;
    block->size = (Py_ssize_t)bytes->used;
    *bytes = (Bytes){.hint = bytes->used + bytes->used / 16};
    if (block->at == NULL) {
        Py_DECREF(block);
        return PyErr_NoMemory();
    }
    return (PyObject *)block;
}

static PyObject *node_made(Node *node) {
    PyObject *valid = NULL, *values = NULL, *data = NULL, *children = PyList_New(node->count), *made = NULL;
    if (children == NULL) return NULL;
    for (uint32_t place = 0; place < node->count; place++) {
        PyObject *child = node_made(&node->children[place]);
        if (child == NULL) goto end;
        PyList_SET_ITEM(children, place, child);
    }
    valid = node->nulls ? block_of(&node->valid) : Py_NewRef(Py_None);
    values = node->kind == AS_STRUCT ? Py_NewRef(Py_None) : block_of(&node->values);
    data = has_data(node) ? block_of(&node->data) : Py_NewRef(Py_None);
    if (valid != NULL && values != NULL && data != NULL)
        made = Py_BuildValue("LLLIOOOO", (long long)node->length, (long long)node->nulls, (long long)node->conflicts,
                             node->found, valid, values, data, children);
end:
    Py_XDECREF(valid);
    Py_XDECREF(values);
    Py_XDECREF(data);
    Py_DECREF(children);
    return made;
}

/* ------------------------------------------------------------------------------------------------ plans */

static void node_clear(Node *node) {
    for (uint32_t place = 0; node->children != NULL && place < node->count; place++) node_clear(&node->children[place]);
    free(node->children);
    free(node->table);
    free(node->name);
    free(node->valid.at);
    free(node->values.at);
    free(node->data.at);
    memset(node, 0, sizeof *node);
}

static void plan_free(PyObject *capsule) {
    Plan *plan = PyCapsule_GetPointer(capsule, "headwater.documents.plan");
    if (plan == NULL) return;
    node_clear(&plan->root);
    free(plan);
}

static uint8_t width_of(const Node *node) {
    switch (node->kind) {
    case AS_INT: return 4;
    case AS_LONG:
    case AS_DOUBLE:
    case AS_DATE:
    case AS_TIMESTAMP: return 8;
    case AS_DECIMAL: return node->digits <= 38 ? 16 : 32;
    default: return 0;
    }
}

/* The table that finds children by name, and which child is expected after each. */
static bool node_index(Node *node) {
    node->slots = 4;
    while (node->slots < 2 * node->count + 2) node->slots *= 2;
    node->table = malloc(node->slots * sizeof *node->table);
    if (node->table == NULL) return false;
    for (uint32_t slot = 0; slot < node->slots; slot++) node->table[slot] = -1;
    for (uint32_t place = 0; place < node->count; place++) {
        Node *child = &node->children[place];
        child->same = -1;
        child->follow = (int32_t)place + 1;
        if (child->kind >= AS_DOCUMENT) continue;
        int32_t first = find_child(node, child->name, child->name_size);
        if (first >= 0) {
            while (node->children[first].same >= 0) first = node->children[first].same;
            node->children[first].same = (int32_t)place;
            continue;
        }
        uint32_t slot = name_hash(child->name, child->name_size) & (node->slots - 1);
        while (node->table[slot] >= 0) slot = (slot + 1) & (node->slots - 1);
        node->table[slot] = (int32_t)place;
    }
    /* a child that shares its name with one before it, or takes no field, is never expected */
    int32_t next = (int32_t)node->count;
    for (int32_t place = (int32_t)node->count - 1; place >= 0; place--) {
        Node *child = &node->children[place];
        child->follow = next;
        if (child->kind < AS_DOCUMENT && find_child(node, child->name, child->name_size) == place) next = place;
    }
    return true;
}

/* (name, kind, digits, scale, required, children) */
static bool node_describe(Node *node, PyObject *described, int depth) {
    const char *name;
    Py_ssize_t size;
    int kind, digits, scale, required;
    PyObject *children;
    if (!PyArg_ParseTuple(described, "y#iiipO!", &name, &size, &kind, &digits, &scale, &required, &PyTuple_Type,
                          &children))
        return false;
    Py_ssize_t count = PyTuple_GET_SIZE(children);
    bool nested = kind == AS_STRUCT || kind == AS_LIST;
    if (kind < 0 || kind >= KINDS || digits < 0 || digits > 76 || scale < 0 || scale > 255 || depth > 64 ||
        size > INT32_MAX || count > MOST_CHILDREN || (count > 0) != nested || (kind == AS_LIST && count != 1) ||
        (kind >= AS_DOCUMENT && depth != 1) || memchr(name, 0, (size_t)size) != NULL) {
        PyErr_SetString(PyExc_TypeError, "a column is of no kind that is known");
        return false;
    }
    node->kind = (uint8_t)kind;
    node->digits = (uint8_t)digits;
    node->scale = (uint8_t)scale;
    node->required = (uint8_t)required;
    node->width = width_of(node);
    node->name_size = (uint32_t)size;
    node->name = malloc((size_t)size + 1);
    node->children = calloc((size_t)count + 1, sizeof(Node));
    if (node->name == NULL || node->children == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(node->name, name, (size_t)size + 1);
    node->count = (uint32_t)count;
    for (Py_ssize_t place = 0; place < count; place++) {
        PyObject *child = PyTuple_GET_ITEM(children, place);
        if (!PyTuple_Check(child)) {
            PyErr_SetString(PyExc_TypeError, "a column is no tuple");
            return false;
        }
        if (!node_describe(&node->children[place], child, depth + 1)) return false;
    }
    if (!node_index(node)) {
        PyErr_NoMemory();
        return false;
    }
    return true;
}

/* plan(columns) -> what decode is given */
static PyObject *make_plan(PyObject *Py_UNUSED(module), PyObject *columns) {
    Plan *plan = calloc(1, sizeof(Plan));
    if (plan == NULL) return PyErr_NoMemory();
    /* a table has a column at least */
    PyObject *root = Py_BuildValue("(yiiiOO)", "", AS_STRUCT, 0, 0, Py_False, columns), *made = NULL;
    if (root != NULL && node_describe(&plan->root, root, 0)) made = PyCapsule_New(plan, "headwater.documents.plan", plan_free);
    Py_XDECREF(root);
    if (made == NULL) {
        node_clear(&plan->root);
        free(plan);
    }
    return made;
}

/* ------------------------------------------------------------------------------------------------ batches */

typedef struct {
    Py_buffer data, offsets, validity;
    bool has_offsets, has_validity;
    Py_ssize_t first, rows; /* without offsets, first: how the documents stand */
} Batch;

enum { IN_A_ROW, IN_AN_ARRAY };

/* The documents of a BSON array; *number: the one that was read last. */
static int take_array(State *state, Node *root, const uint8_t *at, const uint8_t *last, Py_ssize_t *number) {
    const uint8_t *end = document_end(state, at, last);
    if (end == NULL) return WRONG;
    if (end != last) return wrong(state, ENDLESS);
    Element element;
    for (at += 4, end--; at < end; at = element.stop, (*number)++) {
        if (!next_element(state, at, end, &element)) return WRONG;
        if (element.kind != OBJECT) return wrong(state, "an array holds what is no document");
        if (take_document(state, root, element.start, element.stop) != DONE) return WRONG;
    }
    return DONE;
}

/* The documents of a batch; *number: the one that was read last. */
static int take_batch(State *state, Node *root, const Batch *batch, Py_ssize_t *number) {
    const uint8_t *start = batch->data.buf, *last = start + batch->data.len;
    *number = 0;
    if (!batch->has_offsets && batch->first == IN_AN_ARRAY) return take_array(state, root, start, last, number);
    if (!batch->has_offsets) {
        for (const uint8_t *at = start; at < last; (*number)++) {
            const uint8_t *end = document_end(state, at, last);
            if (end == NULL || take_document(state, root, at, end) != DONE) return WRONG;
            at = end;
        }
        return DONE;
    }
    const uint8_t *offsets = (const uint8_t *)batch->offsets.buf + 4 * batch->first, *valid = batch->validity.buf;
    for (; *number < batch->rows; (*number)++) {
        Py_ssize_t place = batch->first + *number;
        if (batch->has_validity && !(valid[place >> 3] >> (place & 7) & 1)) {
            for (uint32_t child = 0; child < root->count; child++)
                if (add_null(state, &root->children[child]) != DONE) return WRONG;
            root->length++;
            continue;
        }
        int32_t from = int32_at(offsets + 4 * *number), to = int32_at(offsets + 4 * *number + 4);
        if (from < 0 || from > to || to > batch->data.len) return wrong(state, CUT);
        const uint8_t *end = document_end(state, start + from, start + to);
        if (end == NULL) return WRONG;
        if (end != start + to) return wrong(state, ENDLESS);
        if (take_document(state, root, start + from, end) != DONE) return WRONG;
    }
    return DONE;
}

/* decode(plan, data, offsets or None, validity or None, first, rows) -> (rows, [column])
 *
 * data: documents one after another (first 0) or a BSON array of them (first 1); with offsets: those of a binary Arrow
 * array, of which *rows* elements from *first* on are taken. ValueError: these are no documents. */
static PyObject *decode(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *capsule, *offsets, *validity, *made = NULL;
    Batch batch = {0};
    if (!PyArg_ParseTuple(args, "Oy*OOnn", &capsule, &batch.data, &offsets, &validity, &batch.first, &batch.rows))
        return NULL;
    Plan *plan = PyCapsule_GetPointer(capsule, "headwater.documents.plan");
    if (plan == NULL) goto end;
    if (plan->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a plan is used by one thread at a time");
        goto end;
    }
    if (offsets != Py_None) {
        if (PyObject_GetBuffer(offsets, &batch.offsets, PyBUF_SIMPLE) < 0) goto end;
        batch.has_offsets = true;
        if (batch.first < 0 || batch.rows < 0 || batch.offsets.len / 4 - 1 - batch.first < batch.rows) {
            PyErr_SetString(PyExc_ValueError, "there are fewer documents than rows");
            goto end;
        }
    }
    if (offsets != Py_None && validity != Py_None) {
        if (PyObject_GetBuffer(validity, &batch.validity, PyBUF_SIMPLE) < 0) goto end;
        batch.has_validity = true;
        if (batch.validity.len < (batch.first + batch.rows + 7) / 8) {
            PyErr_SetString(PyExc_ValueError, "there are fewer documents than rows");
            goto end;
        }
    }
    State state = {0};
    Py_ssize_t number = 0;
    int ended = WRONG;
    plan->busy = true;
    Py_BEGIN_ALLOW_THREADS;
    locale_t before = uselocale(plain_locale);
    if (node_begin(&plan->root)) ended = take_batch(&state, &plan->root, &batch, &number);
    else state.wrong = NO_MEMORY;
    uselocale(before);
    Py_END_ALLOW_THREADS;
    if (ended != DONE) {
        if (state.wrong == NO_MEMORY) PyErr_NoMemory();
        else PyErr_Format(PyExc_ValueError, "document %zd: %s", number, state.wrong);
        plan->busy = false;
        goto end;
    }
    PyObject *columns = PyList_New(plan->root.count);
    for (uint32_t place = 0; columns != NULL && place < plan->root.count; place++) {
        PyObject *column = node_made(&plan->root.children[place]);
        if (column == NULL) Py_CLEAR(columns);
        else PyList_SET_ITEM(columns, place, column);
    }
    if (columns != NULL) made = Py_BuildValue("LN", (long long)plan->root.length, columns);
    plan->busy = false;
end:
    if (batch.has_offsets) PyBuffer_Release(&batch.offsets);
    if (batch.has_validity) PyBuffer_Release(&batch.validity);
    PyBuffer_Release(&batch.data);
    return made;
}

static PyMethodDef methods[] = {
    {"plan", make_plan, METH_O, NULL},
    {"decode", decode, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "headwater.sources.mongodb.documents._documents",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__documents(void) {
    plain_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (plain_locale == (locale_t)0) return PyErr_SetFromErrno(PyExc_OSError);
    if (PyType_Ready(&block_type) < 0) return NULL;
    return PyModule_Create(&module);
}
