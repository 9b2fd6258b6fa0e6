//! Macros for the common shapes of the wire format: named numbers, bit fields in an integer, and fields in a command's
//! dwords.
//!
//! Alternative considered: the crate `bitfield-struct` cannot replace `bit_field!`. It requires every reserved bit as a
//! field, in order, but the specification's tables name bits as `high:low`. Its builders panic on a value that is too
//! large. The builders here truncate such a value, because a guest's value must never end the process. Its integer is
//! private, but parsers and tests here read `.0`. `command!`, with fields in several dwords, would still need masks.

/// Declares an open enum: an integer type with names for some values.
///
/// Values without a name are valid too. So any value from a controller or a driver can be stored, compared, printed and
/// passed on.
macro_rules! open_enum {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($repr:ident) {
            $( $(#[$value_meta:meta])* $value_name:ident = $value:expr, $text:literal; )*
        }
    ) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash,
            ::zerocopy::FromBytes, ::zerocopy::IntoBytes,
            ::zerocopy::Immutable, ::zerocopy::KnownLayout,
        )]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        pub struct $name(pub $repr);

        impl $name {
            $(
                #[doc = concat!($text, ".")]
                $(#[$value_meta])*
                pub const $value_name: Self = Self($value);
            )*

            /// Returns the specification's name of this value; `None` if it has none.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                $( if self.0 == Self::$value_name.0 { return Some($text); } )*
                None
            }
        }

        impl ::core::fmt::Display for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), " {:#x}"), self.0),
                }
            }
        }

        impl ::core::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                match self.name() {
                    Some(name) => write!(f, concat!(stringify!($name), "({:#x}, {})"), self.0, name),
                    None => write!(f, concat!(stringify!($name), "({:#x})"), self.0),
                }
            }
        }
    };
}

/// Declares an integer type with bit fields: `getter / builder: type [high:low]` or `[bit]`.
///
/// The type of a field is `bool`, an unsigned integer, or `Newtype(integer)`. A getter reads only its own bits, so
/// reserved bits never affect a field. A builder replaces only its own bits, and truncates its value to them.
macro_rules! bit_field {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($repr:ident) {
            $(
                $(#[$field_meta:meta])*
                $get:ident / $with:ident: $ty:ident $(($inner:ident))? [$($bits:tt)+];
            )*
        }
    ) => {
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(
            Clone, Copy, Default, PartialEq, Eq, Hash,
            ::zerocopy::FromBytes, ::zerocopy::IntoBytes,
            ::zerocopy::Immutable, ::zerocopy::KnownLayout,
        )]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
        pub struct $name(pub $repr);

        impl $name {
            $(
                bit_field!(@get [$(#[$field_meta])*] $repr $get $ty $(($inner))? [$($bits)+]);
                bit_field!(@with $repr $get $with $ty $(($inner))? [$($bits)+]);
            )*
        }

        impl ::core::fmt::Debug for $name {
            fn fmt(&self, f: &mut ::core::fmt::Formatter<'_>) -> ::core::fmt::Result {
                f.debug_struct(stringify!($name))
                    $( .field(stringify!($get), &self.$get()) )*
                    .finish()
            }
        }
    };

    (@get [$($doc:tt)*] $repr:ident $get:ident bool [$bit:literal]) => {
        $($doc)*
        #[inline]
        #[must_use]
        pub const fn $get(self) -> bool {
            self.0 & (1 << $bit) != 0
        }
    };
    (@get [$($doc:tt)*] $repr:ident $get:ident $ty:ident [$high:literal:$low:literal]) => {
        $($doc)*
        #[inline]
        #[must_use]
        pub const fn $get(self) -> $ty {
            ((self.0 >> $low) & bit_field!(@mask $repr $high $low)) as $ty
        }
    };
    (@get [$($doc:tt)*] $repr:ident $get:ident $ty:ident ($inner:ident) [$high:literal:$low:literal]) => {
        $($doc)*
        #[inline]
        #[must_use]
        pub const fn $get(self) -> $ty {
            $ty(((self.0 >> $low) & bit_field!(@mask $repr $high $low)) as $inner)
        }
    };

    (@with $repr:ident $get:ident $with:ident bool [$bit:literal]) => {
        #[doc = concat!("This value with [`Self::", stringify!($get), "`] replaced.")]
        #[inline]
        #[must_use]
        pub const fn $with(self, value: bool) -> Self {
            Self(self.0 & !(1 << $bit) | ((value as $repr) << $bit))
        }
    };
    (@with $repr:ident $get:ident $with:ident $ty:ident [$high:literal:$low:literal]) => {
        #[doc = concat!("This value with [`Self::", stringify!($get), "`] replaced.")]
        #[inline]
        #[must_use]
        pub const fn $with(self, value: $ty) -> Self {
            let mask = bit_field!(@mask $repr $high $low);
            Self(self.0 & !(mask << $low) | ((value as $repr & mask) << $low))
        }
    };
    (@with $repr:ident $get:ident $with:ident $ty:ident ($inner:ident) [$high:literal:$low:literal]) => {
        #[doc = concat!("This value with [`Self::", stringify!($get), "`] replaced.")]
        #[inline]
        #[must_use]
        pub const fn $with(self, value: $ty) -> Self {
            let mask = bit_field!(@mask $repr $high $low);
            Self(self.0 & !(mask << $low) | ((value.0 as $repr & mask) << $low))
        }
    };

    (@mask $repr:ident $high:literal $low:literal) => {
        ($repr::MAX >> ($repr::BITS - 1 - ($high - $low)))
    };
}

/// Declares the fields in the dwords of a command: `field: type = dword[high:low]`, `dword[bit]`, or `low.high` for a
/// number in two dwords.
///
/// `From<&Sqe>` reads the fields. `write_to` replaces the bits of the fields in an entry and keeps all other bits. Fields
/// have the types that `bit_field!` allows.
macro_rules! command {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $(
                $(#[$field_meta:meta])*
                $field:ident: $ty:ident $(($inner:ident))? =
                    $dword:ident $(. $high_dword:ident)? $([$($bits:tt)+])?;
            )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$field_meta])* pub $field: $ty, )*
        }

        impl From<&$crate::sqe::Sqe> for $name {
            #[inline]
            fn from(sqe: &$crate::sqe::Sqe) -> Self {
                Self {
                    $(
                        $field: command!(
                            @get sqe $ty $(($inner))? = $dword $(. $high_dword)? $([$($bits)+])?
                        ),
                    )*
                }
            }
        }

        impl $name {
            /// Writes the fields to an entry. Other bits are not changed.
            #[inline]
            pub const fn write_to(self, sqe: &mut $crate::sqe::Sqe) {
                $(
                    let value = self.$field $( .0 as $inner )?;
                    command!(@set sqe value = $dword $(. $high_dword)? $([$($bits)+])?);
                )*
            }
        }
    };

    (@get $sqe:ident bool = $dword:ident [$bit:literal]) => {
        $sqe.$dword & (1 << $bit) != 0
    };
    (@get $sqe:ident $ty:ident = $dword:ident [$high:literal:$low:literal]) => {
        (($sqe.$dword >> $low) & bit_field!(@mask u32 $high $low)) as $ty
    };
    (@get $sqe:ident $ty:ident ($inner:ident) = $dword:ident [$high:literal:$low:literal]) => {
        $ty(command!(@get $sqe $inner = $dword [$high:$low]))
    };
    (@get $sqe:ident u64 = $low:ident.$high:ident) => {
        $sqe.$low as u64 | ($sqe.$high as u64) << 32
    };
    (@get $sqe:ident $ty:ident (u64) = $low:ident.$high:ident) => {
        $ty(command!(@get $sqe u64 = $low.$high))
    };

    (@set $sqe:ident $value:ident = $dword:ident [$bit:literal]) => {
        $sqe.$dword = $sqe.$dword & !(1 << $bit) | ($value as u32) << $bit
    };
    (@set $sqe:ident $value:ident = $dword:ident [$high:literal:$low:literal]) => {
        let mask = bit_field!(@mask u32 $high $low);
        $sqe.$dword = $sqe.$dword & !(mask << $low) | ($value as u32 & mask) << $low
    };
    (@set $sqe:ident $value:ident = $low:ident.$high:ident) => {
        $sqe.$low = $value as u32;
        $sqe.$high = ($value >> 32) as u32
    };
}

#[cfg(test)]
#[expect(
    unreachable_pub,
    reason = "the macros declare public types, wherever they are used"
)]
mod tests {
    use crate::sqe::Sqe;

    open_enum! {
        /// Number with names for two of its values.
        pub struct NamedNumber(u8) {
            RED = 1, "Red";
            BLUE = 2, "Blue";
        }
    }

    bit_field! {
        /// Integer with every kind of field.
        pub struct FieldKinds(u32) {
            /// One bit.
            flag / with_flag: bool [0];
            /// Several bits.
            count / with_count: u8 [7:4];
            /// Bits with a type of their own.
            colour / with_colour: NamedNumber(u8) [9:8];
        }
    }

    bit_field! {
        /// Integer with a single field.
        pub struct WholeIntegerField(u16) {
            /// All bits.
            all / with_all: u16 [15:0];
        }
    }

    command! {
        /// Command with fields in every place that is possible.
        pub struct FieldPlaces {
            /// One bit.
            flag: bool = cdw12[31];
            /// Several bits.
            count: u16 = cdw12[15:0];
            /// Bits with a type of their own.
            colour: NamedNumber(u8) = cdw12[17:16];
            /// A whole dword.
            whole: u32 = cdw13[31:0];
            /// Two dwords.
            wide: u64 = cdw10.cdw11;
        }
    }

    #[test]
    fn a_command_reads_and_writes_only_its_own_bits() {
        let all = Sqe {
            cdw10: 2,
            cdw11: 1,
            cdw12: !0,
            cdw13: !0,
            cdw14: !0,
            ..Sqe::default()
        };
        let read = FieldPlaces::from(&all);
        assert_eq!(
            (read.flag, read.count, read.colour),
            (true, 0xFFFF, NamedNumber(3))
        );
        assert_eq!((read.whole, read.wide), (!0, 0x1_0000_0002));

        let mut written = all;
        FieldPlaces {
            colour: NamedNumber::BLUE,
            wide: 5 << 32,
            ..Default::default()
        }
        .write_to(&mut written);
        assert_eq!((written.cdw10, written.cdw11), (0, 5));
        assert_eq!(
            (written.cdw12, written.cdw13, written.cdw14),
            (0x7FFE_0000, 0, !0)
        );
        read.write_to(&mut written);
        assert_eq!(written, all);
    }

    #[test]
    fn values_without_a_name_are_kept_and_printed() {
        assert_eq!(NamedNumber::RED.to_string(), "Red");
        assert_eq!(NamedNumber(0x40).to_string(), "NamedNumber 0x40");
        assert_eq!(format!("{:?}", NamedNumber::BLUE), "NamedNumber(0x2, Blue)");
        assert_eq!(NamedNumber(0x40).name(), None);
    }

    #[test]
    fn a_field_reads_and_writes_only_its_own_bits() {
        let all = FieldKinds(u32::MAX);
        assert_eq!(
            (all.flag(), all.count(), all.colour()),
            (true, 0xF, NamedNumber(3))
        );
        assert_eq!(all.with_flag(false).0, 0xFFFF_FFFE);
        assert_eq!(all.with_count(0).0, 0xFFFF_FF0F);
        assert_eq!(
            FieldKinds::default().with_colour(NamedNumber::BLUE).0,
            0x200
        );
        assert_eq!(FieldKinds::default().with_count(5).with_count(3).0, 0x30);
    }

    #[test]
    fn a_builder_keeps_what_fits() {
        assert_eq!(FieldKinds::default().with_count(0xAB).0, 0xB0);
        assert_eq!(WholeIntegerField::default().with_all(0xFFFF).all(), 0xFFFF);
    }
}
