/* The calendar of MySQL and MariaDB, for both decoders: that of rows of a query and that of rows of the log. */

#ifndef HEADWATER_CALENDAR_H
#define HEADWATER_CALENDAR_H

#include <stdbool.h>
#include <stdint.h>

#define DAY_US INT64_C(86400000000)

/* Days since 1970 of a date of the Gregorian calendar. */
static inline int64_t days_of(int64_t year, int month, int day) {
    year -= month <= 2;
    int64_t era = (year >= 0 ? year : year - 399) / 400, of_era = year - era * 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

/* month: 0, of which no day is one, to 12 */
static inline int days_in(int year, int month) {
    static const uint8_t DAYS_IN[13] = {0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    return DAYS_IN[month] + (month == 2 && leap);
}

#endif
