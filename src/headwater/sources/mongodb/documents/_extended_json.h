/* Relaxed extended JSON of BSON values; extended_json.py is the same in Python and says why it is so. */
#ifndef HEADWATER_EXTENDED_JSON_H
#define HEADWATER_EXTENDED_JSON_H

#include "_values.h"

#define LAST_DATE INT64_C(253402300799999)

static int put_document(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array);

static int put_value(State *state, Bytes *to, uint8_t kind, const uint8_t *start, const uint8_t *stop, int depth) {
    int ended;
    switch (kind) {
    case DOUBLE: {
        double number;
        memcpy(&number, start, 8);
        MUST(put_double(to, number));
        return DONE;
    }
    case STRING:
        return put_quoted(state, to, start + 4, (size_t)(stop - start) - 5);
    case OBJECT:
    case ARRAY:
        return put_document(state, to, start, stop, depth + 1, kind == ARRAY);
    case BINARY: {
        uint8_t subtype;
        if (!binary_content(state, &start, stop, &subtype)) return WRONG;
        MUST(PUT_TEXT(to, "{\"$binary\":{\"base64\":\"") && put_base64(to, start, (size_t)(stop - start)) &&
             PUT_TEXT(to, "\",\"subType\":\"") && put_hex(to, &subtype, 1) && PUT_TEXT(to, "\"}}"));
        return DONE;
    }
    case UNDEFINED:
        MUST(PUT_TEXT(to, "{\"$undefined\":true}"));
        return DONE;
    case OBJECT_ID:
        MUST(PUT_TEXT(to, "{\"$oid\":\"") && put_hex(to, start, 12) && PUT_TEXT(to, "\"}"));
        return DONE;
    case BOOL:
        MUST(*start ? PUT_TEXT(to, "true") : PUT_TEXT(to, "false"));
        return DONE;
    case DATE: {
        int64_t ms = int64_at(start);
        if (ms >= 0 && ms <= LAST_DATE) {
            MUST(PUT_TEXT(to, "{\"$date\":\"") && put_date(to, ms) && PUT_TEXT(to, "\"}"));
        } else {
            MUST(PUT_TEXT(to, "{\"$date\":{\"$numberLong\":\"") && put_whole(to, ms) && PUT_TEXT(to, "\"}}"));
        }
        return DONE;
    }
    case NULL_VALUE:
        MUST(PUT_TEXT(to, "null"));
        return DONE;
    case REGEX: {
        const uint8_t *middle = cstring_end(state, start, stop);
        if (middle == NULL) return WRONG;
        MUST(PUT_TEXT(to, "{\"$regularExpression\":{\"pattern\":"));
        if ((ended = put_quoted(state, to, start, (size_t)(middle - start) - 1)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"options\":"));
        if ((ended = put_quoted(state, to, middle, (size_t)(stop - middle) - 1)) != DONE) return ended;
        MUST(PUT_TEXT(to, "}}"));
        return DONE;
    }
    case DB_POINTER:
        MUST(PUT_TEXT(to, "{\"$dbPointer\":{\"$ref\":"));
        if ((ended = put_quoted(state, to, start + 4, (size_t)(stop - start) - 17)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"$id\":{\"$oid\":\"") && put_hex(to, stop - 12, 12) && PUT_TEXT(to, "\"}}}"));
        return DONE;
    case CODE:
    case SYMBOL:
        MUST(kind == CODE ? PUT_TEXT(to, "{\"$code\":") : PUT_TEXT(to, "{\"$symbol\":"));
        if ((ended = put_quoted(state, to, start + 4, (size_t)(stop - start) - 5)) != DONE) return ended;
        MUST(put_byte(to, '}'));
        return DONE;
    case CODE_WITH_SCOPE: {
        const uint8_t *middle = string_end(state, start + 4, stop);
        if (middle == NULL) return WRONG;
        MUST(PUT_TEXT(to, "{\"$code\":"));
        if ((ended = put_quoted(state, to, start + 8, (size_t)(middle - start) - 9)) != DONE) return ended;
        MUST(PUT_TEXT(to, ",\"$scope\":"));
        if ((ended = put_document(state, to, middle, stop, depth + 1, false)) != DONE) return ended;
        MUST(put_byte(to, '}'));
        return DONE;
    }
    case INT:
        MUST(put_whole(to, int32_at(start)));
        return DONE;
    case LONG:
        MUST(put_whole(to, int64_at(start)));
        return DONE;
    case TIMESTAMP:
        MUST(PUT_TEXT(to, "{\"$timestamp\":{\"t\":") && put_whole(to, (uint32_t)int32_at(start + 4)) &&
             PUT_TEXT(to, ",\"i\":") && put_whole(to, (uint32_t)int32_at(start)) && PUT_TEXT(to, "}}"));
        return DONE;
    case DECIMAL: {
        Decimal decimal;
        read_decimal(start, &decimal);
        MUST(PUT_TEXT(to, "{\"$numberDecimal\":\"") && put_decimal(to, &decimal) && PUT_TEXT(to, "\"}"));
        return DONE;
    }
    case MIN_KEY:
        MUST(PUT_TEXT(to, "{\"$minKey\":1}"));
        return DONE;
    default:
        MUST(PUT_TEXT(to, "{\"$maxKey\":1}"));
        return DONE;
    }
}

static int put_field(State *state, Bytes *to, const Element *element, int depth) {
    int ended = put_quoted(state, to, element->name, element->name_size);
    if (ended != DONE) return ended;
    MUST(put_byte(to, ':'));
    return put_value(state, to, element->kind, element->start, element->stop, depth);
}

static int put_document(State *state, Bytes *to, const uint8_t *at, const uint8_t *end, int depth, bool is_array) {
    if (depth > MOST_NESTED) return wrong(state, TOO_DEEP);
    MUST(put_byte(to, is_array ? '[' : '{'));
    bool first = true;
    Element element;
    for (at += 4, end--; at < end; at = element.stop) {
        if (!next_element(state, at, end, &element)) return WRONG;
        if (!first) MUST(put_byte(to, ','));
        first = false;
        int ended = is_array ? put_value(state, to, element.kind, element.start, element.stop, depth)
                             : put_field(state, to, &element, depth);
        if (ended != DONE) return ended;
    }
    MUST(put_byte(to, is_array ? ']' : '}'));
    return DONE;
}

#endif
