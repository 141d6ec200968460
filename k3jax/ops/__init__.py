"""Operations: one folder or file each, arrays in and arrays out; they know no model."""
